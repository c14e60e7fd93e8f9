"""The soft band of one row, for decisions: in numpy, whose calls cost less than the arithmetic.

A decision takes 5 to 30 passes over the row. On 2,048 tokens a pass takes a third of a
microsecond and a call of torch two or more, of numpy about one half. One call that clips takes
half of one for each side.
"""

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cactus_theory._scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.decide import LEAST, MOST, SETTLED, SLACK, STEEPNESS, RisingRoot
from cactus_theory.optimum.soft import Steps, Worth

Row = np.ndarray
# longer rows are worked on in parts: they stay near the core, and sums of so many products are
# right to the last few digits; the softmax of a longer row may miss 1 by more
PART = 16384
# an edge this share of the largest ratio gives visible mass to tokens with q = 0
SMALL = 1e-12
# where f′ is flat, a little of the free number may be much of u_1: it is settled to this, or
# until Σ g is right up to rounding
SENSITIVE = 2e-14
ROUNDING = {torch.float32: 1e-7, torch.float64: 1e-16}
# what the first step takes for x E′(x): 0.3 to 0.5 took the fewest steps, on random rows and on
# those of the shipped trace
STEEP = 0.4
# levels are float64 whatever the rows are
LOWEST = 1e-290


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


class Pieces(Steps):
    """What the soft bands of one φ at one price have in common: knots, and edges from U_M.

    Attributes
    ----------
    drop : A/U_1 where φ has one piece and edges are multiples of each other, else None.
    """

    def __init__(self, worth: Worth, f: FDivergence, price: float) -> None:
        super().__init__(worth, f, price)
        self.knots, self.bends = worth.knots, worth.knots[:-1]
        self.drop = self.factors[1] if self.factors is not None and not self.bends else None


class SoftRow:
    """One row's soft band, in the row's precision.

    Attributes
    ----------
    upper, scale : U_1, …, U_M, and A = P a, the scale of the residual, once solved.
    """

    def __init__(self, q: Row, p: Row, alive: float, pieces: Pieces) -> None:
        self.pieces, self.kind = pieces, _PRECISIONS[q.dtype]
        self.target, self.unit, self.wanted = q, alive, alive
        safe = q
        if q.min() < self.kind.least:
            safe = scratch("soft_row.q", (len(q),), self.kind.dtype).numpy()
            np.maximum(q, self.kind.least, out=safe)
        memory = _room_for(self, len(q), self.kind)
        self.short = len(memory) == 1
        if self.short:
            ratio, own, spare = memory[0]
            self.parts = [(np.divide(p, safe, out=ratio), safe, own, spare)]
        else:
            self._divide(p, safe, memory)
            mass, drafted = (float(torch.from_numpy(row).sum()) for row in (q, p))
            self.unit, self.wanted = alive * drafted / mass, alive * drafted
        self.upper, self.scale = [math.inf], self.unit
        if pieces.top * self.unit >= SMALL * self.kind.most:
            self._exclude()

    def _divide(self, p: Row, safe: Row, memory: list[tuple[Row, Row, Row]]) -> None:
        """Set p/q part by part."""
        self.parts, first = [], 0
        for ratio, own, spare in memory:
            part = slice(first, first := first + len(own))
            np.divide(p[part], safe[part], out=ratio)
            self.parts.append((ratio, safe[part], own, spare))

    def excess(self, level: float) -> float:
        """Return Σ g − P at U_M = ``level``, which rises with it."""
        drop = self.pieces.drop
        if self.short and drop is not None:  # the same in few steps: rows of usual vocabularies
            ratio, q, own, _ = self.parts[0]
            lower = level * drop
            ratio.clip(lower, max(min(level, self.kind.most), lower), own)
            return float(own.dot(q)) - self.wanted
        return self._beyond(*self.pieces.edges(level, self.unit))

    def _beyond(self, upper: list[float], lower: float) -> float:
        """Return Σ g − P at these edges."""
        bends, most = self.pieces.bends, self.kind.most
        top, total = max(min(upper[-1], most), lower), 0.0
        for ratio, q, own, spare in self.parts:
            ratio.clip(lower, top, own)
            for knot, edge in zip(bends, upper, strict=False):
                np.minimum(ratio, min(edge, most) / knot, out=spare)
                np.multiply(spare, knot, out=spare)
                np.maximum(own, spare, out=own)
            total += float(own.dot(q))
        return total - self.wanted

    def passes(self, asked: float) -> bool:
        """Return whether U_M > ``asked``; if not, ``upper`` and ``scale`` are solved."""
        pieces, slack = self.pieces, self.kind.slack
        low, high = pieces.low * self.unit, pieces.high * self.unit
        if asked <= low * (1 - slack):
            return True
        if high == math.inf:
            high = max(self._largest(), self.unit)
            if self.excess(high) < 0:
                return asked <= high or self._uncut(high)
        if pieces.steep or pieces.bent:
            if asked < high and self.excess(asked) < 0:
                return True
            if pieces.steep or self.excess(self.unit) > 0:
                return self._sloped()
            low = self.unit
        low, high = max(low * (1 - slack), LOWEST), high * (1 + slack)
        start = asked if low < asked < high else math.sqrt(low * high)
        settled, close = self.kind.settled, 0.0
        if pieces.bent:
            settled, close = SENSITIVE, ROUNDING[self.kind.dtype] * self.wanted
        root = RisingRoot(low, high, start, settled, STEEP)
        while not root.done:
            value = self.excess(root.x)
            if root.x == asked and value < 0:
                return True
            if abs(value) < close:
                break
            root.tell(value)
        self.upper, self.scale = pieces.edges(root.x, self.unit)
        return False

    def recovers(self, asked: float) -> bool:
        """Return whether A > ``asked`` (then it is solved) of a token that :meth:`passes`.

        If not, and φ has one piece, the token is emitted as often as it is drafted.
        """
        factors = self.pieces.factors
        if asked >= self.unit or (factors and self.excess(asked / factors[1]) >= 0):
            return False
        self.passes(math.inf)
        return self.scale > asked

    def _sloped(self) -> bool:
        """Solve for the row by f′(a)."""
        pieces, slack = self.pieces, self.kind.slack
        root = RisingRoot(1 - slack, 2 + slack, 1.5, SENSITIVE / max(pieces.span, 1.0), STEEPNESS)
        while not root.done:
            value = self._beyond(*pieces.by_slope(root.x, self.unit))
            if abs(value) <= ROUNDING[self.kind.dtype] * self.wanted:
                break
            root.tell(value)
        self.upper, self.scale = pieces.by_slope(root.x, self.unit)
        return False

    def _uncut(self, top: float) -> bool:
        """Solve Σ q max(A, p/q) = P, where all of the draft within the support is too little."""
        self.upper = [math.inf] * len(self.pieces.knots)
        low = max(self.pieces.edges(top, self.unit)[1], LOWEST)
        high = self.unit * (1 + self.kind.slack)
        root = RisingRoot(low, high, self.unit, self.kind.settled, STEEP)
        while not root.done:
            root.tell(self._beyond(self.upper, root.x))
        self.scale = root.x
        return False

    def _exclude(self) -> None:
        """Give p/q = 0 to tokens with q = 0: q counts as little, which a large edge undoes."""
        first = 0
        for ratio, *_ in self.parts:
            ratio *= self.target[first : (first := first + len(ratio))] > 0

    def _largest(self) -> float:
        """Return the largest p/q."""
        return max(float(ratio.max()) for ratio, *_ in self.parts)

    def ratio_of(self, asked: float) -> float:
        """Return g_n/p_n of a token with this p_n/q_n, once solved."""
        if asked == 0:
            return math.inf
        if asked == math.inf:
            return 0.0
        pairs = zip(self.upper, self.pieces.knots, strict=True)
        return max(self.scale, *(min(edge, knot * asked) for edge, knot in pairs)) / asked


class _Room:
    """Room for p/q, a result and a spare row of ``count``, part by part, for one row at a time.

    Results of one part are written over those of the part before, so that they stay near the
    core.
    """

    def __init__(self, count: int, kind: Precision) -> None:
        self.key = count, kind.dtype
        ratio = scratch("soft_row", (count,), kind.dtype).numpy()
        own, spare = scratch("soft_row.part", (2, min(count, PART)), kind.dtype).numpy()
        parts = (ratio[i : i + PART] for i in range(0, count, PART))
        self.parts = [(part, own[: len(part)], spare[: len(part)]) for part in parts]


def _room_for(user: SoftRow, count: int, kind: Precision) -> list[tuple[Row, Row, Row]]:
    """Return this thread's room, or another if a row that is still there uses it."""
    room, before = getattr(_rows, "last", _NOBODY)
    if room is None or room.key != (count, kind.dtype) or before() is not None:
        room = _Room(count, kind)
    _rows.last = room, weakref.ref(user)
    return room.parts


_NOBODY: Any = None, None
_rows = threading.local()


def sure_of(pieces: Sequence[Pieces]) -> tuple[float, float]:
    """Return bounds on h_n/q_n that hold under any of these: the least U_M/P, the largest U_1/P.

    Below the first, r ≥ 1 or h_n/q_n is at least that; nothing exceeds the second.
    """
    return min(own.low for own in pieces), max(own.top for own in pieces)
