"""Boxes: bounds on h/q of single tokens.

Boxes keep tokens off a head of likely tokens from rising above q, floored tokens from falling below
q, and held tokens at q. The best row with c q ≤ h ≤ C q is the band cut to these boxes (THEORY.md,
Theorems 24 and 25).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cactus_theory.base.roots import rising_root
from cactus_theory.base.tolerances import MOST
from cactus_theory.optimum.sorted_path import PerRow, Rows

# no boxes, for compiled loops: the least q of the head, ids that must not fall, and their C
FREE = 0.0, np.empty(0, np.int64), np.empty(0)

# relative width at which the search for an edge ends
SETTLED = 1e-13


@dataclass(frozen=True)
class Boxes:
    """Bounds c ≤ h/q ≤ C of single tokens.

    The ``head`` are tokens with q ≥ head · max q; no other token may rise (C = 1). Tokens of
    ``floored`` must not fall (c = 1), tokens of ``held`` keep their q.
    """

    head: float = 0.0
    floored: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Return the tokens that must not fall, in ascending order."""
        return tuple(sorted({*self.held, *self.floored}))

    def __bool__(self) -> bool:
        """Return whether there is any box."""
        return bool(self.head or self.ids)

    def check(self, vocab: int) -> None:
        """Raise ValueError for ids outside a vocabulary of ``vocab`` tokens."""
        if self.ids and max(self.ids) >= vocab:
            tokens = f"must be below the rows' {vocab} tokens; got {max(self.ids)}"
            raise ValueError(f"floor, hold: {tokens}")

    def of_row(self, q: np.ndarray) -> Any:
        """Return boxes for compiled loops: the head's least q, ids that must not fall, their C."""
        if not self:
            return FREE
        self.check(q.size)
        least = self.head * float(q.max()) if self.head else 0.0
        ceilings = [1.0 if token in self.held else math.inf for token in self.ids]
        return least, np.array(self.ids, np.int64), np.array(ceilings)

    def of_rows(self, q: Rows) -> tuple[Rows | None, Rows | None]:
        """Return c and C of the tokens of rows (R, V); None for a side without bounds."""
        self.check(q.shape[-1])
        floor = ceiling = None
        if self.ids:
            floor = torch.zeros_like(q)
            floor[:, list(self.ids)] = 1.0
        if self.head or self.held:
            on = q >= self.head * q.amax(-1, keepdim=True)
            ceiling = torch.where(on, math.inf, 1.0).to(q.dtype)
            ceiling[:, list(self.held)] = 1.0
        return floor, ceiling


NO_BOXES = Boxes()


def cut_to_boxes(
    q: Rows, p: Rows, alive: PerRow, floor: Rows | None, ceiling: Rows | None
) -> tuple[Rows, PerRow]:
    """Return the draft's row cut to boxes, p′ = clip(p/P, cq, Cq), and 1 − Σ p′.

    1 − Σ p′ is exactly 0 if p′ = p, and negative if Σ p′ > 1. The best row with cq ≤ h ≤ Cq is
    clip(p′, aq, bq): c ≤ 1 is the ``floor`` of each token, C ≥ 1 its ``ceiling``. Rows are float64
    (R, V) that sum to 1; ``alive`` is P > 0 of each row.
    """
    ratio = alive[:, None]
    # no h exceeds 1, and p/P with a tiny P may leave float64
    limit = torch.where(q > 0, 1.0 if ceiling is None else (ceiling * q).clamp(max=1.0), 0.0)
    cut = torch.minimum(p / ratio, limit)
    if floor is not None:
        cut = torch.maximum(cut, floor * q)
    # 1 − Σ p′ by Σ p = 1; written so that no rounding is left if p′ = p
    return cut, ((p - ratio * cut).sum(-1) + alive - 1) / alive


def boxed_about(about: Rows, q: Rows, p: Rows, boxes: Boxes, step: float) -> Rows:
    """Return the best rows under a tilt and boxes: clip(clip(p, a q^θ, a e^step q^θ), cq, Cq).

    ``about`` is the tilted target q^θ, and 1/``step`` the price in tokens per nat. c and C are the
    boxes of q (THEORY.md, Theorem 29). Rows are float64 (R, V): ``about`` and q sum to 1, p is
    divided by P. The sum of h rises with a; a is the root at which the sum is 1. Without boxes
    a ≤ 1 ≤ a e^step. Boxes may move both edges to one side of 1, so all of (0, ∞) is searched.
    """
    floor, ceiling = boxes.of_rows(q)
    least = torch.zeros_like(q) if floor is None else floor * q
    most = torch.ones_like(q) if ceiling is None else torch.where(q > 0, ceiling * q, 0.0)
    wider = math.exp(min(step, math.log(MOST)))

    def row_at(edge: float, row: int) -> Any:
        lower = edge * about[row]
        upper = torch.where(about[row] > 0, (lower * wider).clamp(max=1.0), 0.0)
        return torch.clamp(torch.clamp(p[row], lower, upper), least[row], most[row])

    out = torch.empty_like(q)
    for row in range(len(q)):
        edge = rising_root(
            lambda edge, row=row: float(row_at(edge, row).sum()) - 1,
            low=1 / MOST, high=MOST, start=1.0, settled=SETTLED, steepness=1.0,
        )  # fmt: skip
        out[row] = row_at(edge, row)
    return out
