"""The shipped pair in the shapes of real models, on a device, and prompts for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.decode import left_padded
from ..common.inputs import PAIR, PROMPTS, load_model, load_prompts
from ..inflate import SHAPES, Shape, inflate

TINY_SHAPES = ("tiny", "tiny-draft")


@dataclass(frozen=True)
class Inflated:
    """A target and a draft of these shapes that compute what the shipped pair computes."""

    target: Any
    draft: Any
    target_shape: Shape
    draft_shape: Shape

    @property
    def device(self) -> torch.device:
        """Return where it is."""
        return self.target.device

    @property
    def width(self) -> int:
        """Return the bytes of a number."""
        return self.target.dtype.itemsize


# the pair made last: three tables ask for it in turn, and a device may hold only one
_HELD: dict[tuple[Any, ...], Inflated] = {}


def inflated(
    device: torch.device | str, target_shape: str, draft_shape: str, *, tiny: bool = False
) -> Inflated:
    """Return the shipped pair in two named shapes: bfloat16 on a GPU, float32 on a CPU.

    ``tiny`` takes shapes of a few million weights instead, to rehearse.

    Raises
    ------
    ValueError
        An unknown shape.
    """
    names = TINY_SHAPES if tiny else (target_shape, draft_shape)
    for argument, name in zip(("target_shape", "draft_shape"), names, strict=True):
        if name not in SHAPES:
            raise ValueError(f"{argument}: must be one of {', '.join(SHAPES)}; got {name!r}")
    key = (torch.device(device), *names)
    if key not in _HELD:
        _HELD.clear()
        _HELD[key] = _made(*key)
    return _HELD[key]


def _made(device: torch.device, target_name: str, draft_name: str) -> Inflated:
    shapes = SHAPES[target_name], SHAPES[draft_name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, draft = (
        inflate(load_model(PAIR / part), shape, device=device, dtype=dtype)
        for part, shape in zip(("target", "draft"), shapes, strict=True)
    )
    return Inflated(target, draft, *shapes)


def prompts(pair: Inflated, batch: int) -> dict[str, Any]:
    """Return ids and attention mask of ``batch`` of the shipped prompts, again from the first."""
    found = load_prompts(PROMPTS, PAIR / "target")
    taken: list[Sequence[int]] = list(itertools.islice(itertools.cycle(found), batch))
    ids, mask = left_padded(taken, pair.target)
    return {"input_ids": ids, "attention_mask": mask}
