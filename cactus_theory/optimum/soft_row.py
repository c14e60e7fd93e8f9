"""The soft band of one row, for decisions: in numpy, whose calls cost less than the arithmetic.

A decision takes 5 to 30 passes over the row. On 2,048 tokens a pass takes a third of a
microsecond and a call of torch two or more, of numpy about one half.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cactus_theory._scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.decide import LEAST, MOST, SETTLED, SLACK, STEEPNESS, RisingRoot
from cactus_theory.optimum.soft import Worth, steps_of

Row = np.ndarray
# longer rows are worked on in parts: they stay near the core, and sums of so many products are
# right to the last few digits; the softmax of a longer row may miss 1 by more
PART = 8192


class Precision(NamedTuple):
    """What :mod:`cactus_theory.optimum.decide` says of a dtype."""

    dtype: torch.dtype
    least: float
    most: float
    slack: float
    settled: float


_PRECISIONS = {
    np.dtype(name): Precision(kind, LEAST[kind], MOST[kind], SLACK[kind], SETTLED[kind])
    for name, kind in (("float32", torch.float32), ("float64", torch.float64))
}


class Pieces:
    """What the soft bands of one φ at one price have in common: edges from U_M."""

    def __init__(self, worth: Worth, f: FDivergence, price: float) -> None:
        self.f, self.steps = f, steps_of(worth, price)
        self.knots, self.bends = worth.knots, worth.knots[:-1]
        *rises, fall = self.steps
        self.low, self.high = f.lower_edge(1.0, rises[0]), f.upper_edge(1.0, fall)
        self.factors = None
        if f.scale_free:
            self.factors = [f.upper_edge(1.0, step) for step in rises], f.lower_edge(1.0, fall)

    def edges(self, level: float, unit: float) -> tuple[list[float], float]:
        """Return U_1, …, U_M and A for U_M = ``level``; ``unit`` is P in the row's units."""
        if self.factors is not None:
            return [level * factor for factor in self.factors[0]], level * self.factors[1]
        at, (*rises, fall) = level / unit, self.steps
        upper = [unit * self.f.upper_edge(at, step) for step in rises]
        return upper, unit * self.f.lower_edge(at, fall)


class SoftRow:
    """One row's soft band, in the row's precision.

    Attributes
    ----------
    level : U_M, once solved.
    """

    def __init__(self, q: Row, p: Row, alive: float, pieces: Pieces) -> None:
        self.pieces, self.kind = pieces, _PRECISIONS[q.dtype]
        self.parts = _memory(len(q), self.kind)
        self.target, self.unit, self.wanted = q, alive, alive
        mass = drafted = 0.0
        long, first = len(self.parts) > 1, 0
        for ratio, own, *_ in self.parts:
            part = slice(first, first := first + len(own))
            np.maximum(q[part], self.kind.least, out=own)
            np.divide(p[part], own, out=ratio)
            if long:
                mass += float(np.add.reduce(q[part]))
                drafted += float(np.add.reduce(p[part]))
        if long:
            self.unit, self.wanted = alive * drafted / mass, alive * drafted
        self.level = self.unit

    def excess(self, level: float) -> float:
        """Return Σ g − P at this level, which rises with it."""
        pieces, most = self.pieces, self.kind.most
        upper, lower = pieces.edges(level, self.unit)
        top, bends = min(upper[-1], most), pieces.bends
        total = 0.0
        for ratio, q, own, spare in self.parts:
            np.minimum(ratio, top, out=own)
            np.maximum(own, lower, out=own)
            for knot, edge in zip(bends, upper, strict=False):
                np.minimum(ratio, min(edge, most) / knot, out=spare)
                np.multiply(spare, knot, out=spare)
                np.maximum(own, spare, out=own)
            total += float(own.dot(q))
        return total - self.wanted

    def passes(self, asked: float) -> bool:
        """Return whether U_M > ``asked``; if not, ``level`` is solved."""
        slack = self.kind.slack
        low, high = self.pieces.low * self.unit, self.pieces.high * self.unit
        if asked <= low * (1 - slack):
            return True
        if high >= self.kind.most:
            high = max(self._largest(), self.unit)
        low, high = max(low * (1 - slack), self.kind.least), high * (1 + slack)
        start = asked if low < asked < high else self.unit
        root = RisingRoot(low, high, start, self.kind.settled, STEEPNESS)
        while not root.done:
            value = self.excess(root.x)
            if root.x == asked and value < 0:
                return True
            root.tell(value)
        self.level = root.x
        return False

    def _largest(self) -> float:
        """Return the largest p/q of tokens with q > 0."""
        ratio = np.concatenate([part[0] for part in self.parts])
        return float(np.max(ratio, where=self.target > 0, initial=0.0))

    def ratio_of(self, asked: float) -> float:
        """Return g_n/p_n of a token with this p_n/q_n, once solved."""
        if asked == 0:
            return math.inf
        upper, lower = self.pieces.edges(self.level, self.unit)
        best = max(
            min(edge, knot * asked) for edge, knot in zip(upper, self.pieces.knots, strict=True)
        )
        return max(best, lower) / asked

    @property
    def scale(self) -> float:
        """Return P a, the scale of the residual, once solved."""
        return self.pieces.edges(self.level, self.unit)[1]


def _memory(count: int, kind: Precision) -> list[tuple[Row, Row, Row, Row]]:
    """Return room for p/q, q, a result and a spare row of ``count``, part by part.

    It is this thread's memory, which its next row of this length reuses. Results of one part
    are written over those of the part before, so that they stay near the core.
    """
    kept = _rows.__dict__
    if kept.get("key") != (count, kind.dtype):
        ratio, q = scratch("soft_row", (2, count), kind.dtype).numpy()
        own, spare = scratch("soft_row.part", (2, min(count, PART)), kind.dtype).numpy()
        starts = range(0, count, PART)
        parts = [(ratio[i : i + PART], q[i : i + PART]) for i in starts]
        rooms = ((own[: len(part)], spare[: len(part)]) for part, _ in parts)
        kept["parts"] = [(*part, *room) for part, room in zip(parts, rooms, strict=True)]
        kept["key"] = (count, kind.dtype)
    return kept["parts"]


_rows = threading.local()


def sure_of(pieces: Sequence[Pieces]) -> tuple[float, float]:
    """Return bounds on h_n/q_n that hold under any of these: the least U_M/P, the largest U_1/P.

    Below the first, r ≥ 1 or h_n/q_n is at least that; nothing exceeds the second.
    """
    return min(own.low for own in pieces), max(
        own.f.upper_edge(1.0, own.steps[0] + own.steps[-1]) for own in pieces
    )
