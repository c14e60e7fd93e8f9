"""Checks of single arguments, and warnings about models."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cactus_theory.base.arguments import whole_number

HALF = (torch.float16, torch.bfloat16)
# a draft with so many times its target's parameters is no draft; a little more may be meant
SWAPPED = 1.5
# parameters of models that were looked at
_SIZES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def dtype_of(models: Iterable[Any]) -> str:
    """Return the name of the models' dtype, or their names in order where they differ."""
    return ", ".join(dict.fromkeys(str(model.dtype).removeprefix("torch.") for model in models))


def warn_of(models: Mapping[str, Any]) -> None:
    """Warn of half precision on a CPU, and of a draft that is larger than its target."""
    for name, model in models.items():
        if model.dtype in HALF and model.device.type == "cpu":
            warnings.warn(
                f"{name}: {type(model).__name__} runs in {dtype_of([model])} on a CPU, which may "
                "take longer than plain decoding in float32, and a text may depend on the batch "
                "it is in; load it with dtype=torch.float32",
                stacklevel=4,
            )
            break
    for model in models.values():
        if model not in _SIZES:  # half a millisecond, once
            _SIZES[model] = sum(weight.numel() for weight in model.parameters())
    sizes = [_SIZES[model] for model in models.values()]
    if len(sizes) == 2 and sizes[1] > SWAPPED * sizes[0]:
        warnings.warn(
            f"draft_model: has more parameters ({sizes[1]:,}) than target_model ({sizes[0]:,}); "
            "are they swapped?",
            stacklevel=4,
        )


def end_tokens(eos_token_ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return the ids that end a text."""
    if eos_token_ids is None:
        return frozenset()
    given = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
    for token in given:
        whole_number("eos_token_ids", token, 0)
    return frozenset(given)
