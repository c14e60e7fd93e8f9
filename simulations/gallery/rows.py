"""What the gallery computes on: the shipped trace and pair."""

import torch
from torch import Tensor

from cactus_theory.traces import Trace, row_pairs

from ..common.inputs import ROOT


def shipped_trace() -> Trace:
    """Return the example trace: 68 rounds of 4 drafted tokens over 11 short texts."""
    return Trace.open(ROOT / "simulations" / "data" / "trace")


def real_rows(most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return target and draft rows (R, V) of the shipped trace: all 272, or ``most`` of them."""
    _, target, draft = (torch.cat(part) for part in zip(*row_pairs(shipped_trace()), strict=True))
    if most is None:
        return target, draft
    spread = torch.linspace(0, len(target) - 1, most).long()
    return target[spread], draft[spread]
