"""The band of one row, for decisions: in numpy, whose calls cost less than the arithmetic.

A token n with coin u is kept iff u p_n < b q_n, that is iff r = u p_n/q_n is below the band's
upper edge b, and the first look is at r itself: only a refusal needs the band, for the residual
(aq − p)₊ (THEORY.md, Theorem 15). A row by itself is a node with P = 1.

A decision takes 5 to 30 passes over the row. On 2,048 tokens a pass takes a third of a
microsecond and a call of torch two or more, of numpy about one half. One call that clips takes
half of one for each side.
"""

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.roots import RisingRoot
from cactus_theory.optimum.soft import PRECISIONS, Precision, PricedBand

Row = np.ndarray
# an edge this share of the largest ratio gives visible mass to tokens with q = 0
SMALL = 1e-12
# what the first step takes for x E′(x), where edges are multiples of each other and elsewhere:
# the fewest steps on random rows and in decodes of the shipped pair
STRAIGHT, STEEP = 0.8, 0.4
# x S′(x)/S of the mass below the lower edge, S(x) = Σ(xq − p)₊, on such rows: 1 to 5
RISE = 2.0
# where nothing was cut, a is 0: the next search starts no lower than this share of Σp/Σq
NEAREST = 1e-3


class SoftRow:
    """p/q of one row in the row's precision, part by part, and its band once solved.

    The sums of a short row count as 1 where that moves no decision, unless ``exact``. Where tokens
    are ``certain`` the band is that of the selection law of these and one sampled from p, 0 for
    none: min(p, cq), and cq at certain tokens, c such that its sum is that of p.

    ``unit`` and ``total`` are P in the row's units and Σ g in those of p; ``cap`` is c, ∞ where no
    certain token has q > 0 or the band does not depend on it; once solved, ``upper`` and ``scale``
    are U and A = P a, the scale of the residual.
    """

    def __init__(
        self,
        q: Row,
        p: Row,
        alive: float,
        band: PricedBand,
        exact: bool = False,
        certain: Sequence[int] = (),
    ) -> None:
        self.band, self.precision = band, _PRECISIONS[q.dtype]
        self.target, self.unit, self.total = q, alive, alive
        safe = q
        if q.min() < self.precision.least:
            safe = scratch("soft_row.q", (len(q),), self.precision.dtype).numpy()
            np.maximum(q, self.precision.least, out=safe)
        memory = _memory_for(self, len(q), self.precision)
        self.short = len(memory) == 1
        if self.short:
            ratio, clipped = memory[0]
            self.parts = [(np.divide(p, safe, out=ratio), safe, clipped)]
        else:
            self._divide(p, safe, memory)
        if exact or band.high == math.inf or not self.short:
            mass, drafted = (float(torch.from_numpy(row).sum()) for row in (q, p))
            drafted = drafted or mass
            # a row without mass is refused where a token is drawn from it
            mass = 1.0 if mass <= 0 else mass
            self.unit, self.total = alive * drafted / mass, alive * drafted
        self.upper, self.scale, self.cap = math.inf, self.unit, math.inf
        reached = [token for token in certain if q[token] > 0]
        capped = bool(reached) and band.drop is None
        if capped or band.high * self.unit >= SMALL * self.precision.most:
            self._exclude()
        if reached:  # under KL the band is the same for p = ∞ as for cq, as U ≤ c
            self._offer(reached, self.precision.most)
        if capped:
            self.cap = self._level(alive)
            for ratio, *_ in self.parts:
                np.minimum(ratio, self.cap, out=ratio)

    def _divide(self, p: Row, safe: Row, memory: list[tuple[Row, Row]]) -> None:
        """Set p/q part by part."""
        self.parts, first = [], 0
        for ratio, clipped in memory:
            part = slice(first, first := first + len(ratio))
            np.divide(p[part], safe[part], out=ratio)
            self.parts.append((ratio, safe[part], clipped))

    def _exclude(self) -> None:
        """Give p/q = 0 to tokens with q = 0: q counts as little, which a large edge undoes."""
        first = 0
        for ratio, *_ in self.parts:
            ratio *= self.target[first : (first := first + len(ratio))] > 0

    def _offer(self, tokens: Sequence[int], ratio: float) -> None:
        """Set p/q of tokens."""
        for token in tokens:
            part, place = divmod(token, self.precision.part)
            self.parts[part][0][place] = ratio

    def _level(self, alive: float) -> float:
        """Return c, at which Σ min(p, cq) is Σ p: Newton from below, exact once no token joins."""
        level, before, whole = self.unit / alive, math.inf, self.total / alive
        while True:
            above = sum(float(q.dot(ratio > level)) for ratio, q, *_ in self.parts)
            if not 0 < above < before:  # NaN is not
                return min(level, self.precision.most)
            lacking = whole - self.total - self.beyond(level, 0.0)
            level, before = level + max(lacking, 0.0) / above, above

    def _largest(self) -> float:
        """Return the largest p/q."""
        return max(float(ratio.max()) for ratio, *_ in self.parts)

    def beyond(self, upper: float, lower: float) -> float:
        """Return Σ g − P at these edges, which rises with them."""
        top, total = max(min(upper, self.precision.most), lower), 0.0
        for ratio, q, clipped in self.parts:
            ratio.clip(lower, top, clipped)
            total += float(clipped.dot(q))
        return total - self.total

    def passes(self, threshold: float) -> bool:
        """Return whether U > ``threshold``; if not, ``upper`` and ``scale`` are solved."""
        band, unit = self.band, self.unit
        if threshold <= unit * (1 - self.precision.slack):
            return True
        largest = max(self._largest(), unit) if band.high == math.inf else math.inf
        steepness = STEEP if band.drop is None else STRAIGHT
        search = band.search(unit, largest, self.precision, threshold, steepness)
        drop, most, total = band.drop, self.precision.most, self.total
        while not search.done:
            upper = level = search.x
            if drop is None:
                upper, lower = band.edges(level, unit, largest)
            else:
                lower = level * drop
            top, mass = max(min(upper, most), lower), 0.0
            for ratio, q, clipped in self.parts:  # ``beyond``, without a call
                ratio.clip(lower, top, clipped)
                mass += float(clipped.dot(q))
            if mass < total and level == threshold:
                return True
            search.tell(mass - total)
        self.upper, self.scale = band.edges(search.x, unit, largest)
        return self.upper > threshold

    def ratio_of(self, ratio: float, certain: bool = False) -> float:
        """Return g_n/p_n of a sampled token with this p_n/q_n, once solved."""
        if ratio == 0:
            return math.inf
        if ratio == math.inf:
            return 0.0
        return (self.raised if certain else self._raised(min(ratio, self.cap))) / ratio

    @property
    def raised(self) -> float:
        """Return g/q of certain tokens, once solved; some number where none has q > 0."""
        raised = self._raised(self.cap)
        return raised if raised < math.inf else self.scale

    def _raised(self, ratio: float) -> float:
        """Return g/q at this p/q."""
        return max(self.scale, min(self.upper, ratio))


class BudgetRow:
    """One row's band within a budget; in torch, as the cost of long rows is in their logarithms.

    Σ(aq − p)₊ = Σ(p − bq)₊ gives the a that belongs to b, and D rises with b. The search is for
    √D = √δ: D is flat at b = 1, so that secants in D would end too early at small δ. The sums are
    of differences that are 0 inside the band, so that the edges are as precise as the row.
    ``upper`` and ``scale`` are b and a, once solved.
    """

    def __init__(self, q: Row, p: Row, f: FDivergence, delta: float) -> None:
        self.target, draft = torch.from_numpy(q), torch.from_numpy(p)
        precision = self.precision = PRECISIONS[self.target.dtype]
        memory = scratch("budget_row", (4, len(q)), precision.dtype)
        self.q = torch.clamp(self.target, min=precision.least, out=memory[0])
        self.ratio = torch.div(draft, self.q, out=memory[1])
        self.clipped, self.spare = memory[2], memory[3]
        mass, drafted = (float(row.sum(dtype=torch.float64)) for row in (self.target, draft))
        # a row without mass is refused where a token is drawn from it
        self.mass = 1.0 if mass <= 0 else mass
        self.unit = drafted / self.mass
        self.f, self.root_delta = f, math.sqrt(delta)
        # a and the steepness there, where the last search ended
        self.last_search = self.unit / 2, RISE
        self.upper, self.scale = math.inf, self.unit

    def passes(self, threshold: float) -> bool:
        """Return whether b > ``threshold``; if not, ``upper`` and ``scale`` are solved."""
        most, slack = float(self.ratio.amax()), self.precision.slack
        if most > self.precision.most:
            most = float(torch.where(self.target > 0, self.ratio, 0.0).amax())
        low, high = self.unit * (1 - slack), max(most, self.unit) * (1 + slack)
        if threshold <= low:
            return True
        root = RisingRoot(low, high, threshold, self.precision.settled)
        while not root.done:
            value = self._excess(root.x)
            if root.x == threshold and value < 0:
                return True
            root.tell(value)
        self.upper, self.scale = root.x, self._lower_of(root.x)
        return False

    def _excess(self, upper: float) -> float:
        """Return √D − √δ of the band with this upper edge."""
        lower = self._lower_of(upper)
        clipped = torch.clamp(self.ratio, lower, upper, out=self.clipped).div_(self.unit)
        cost = float(self.f.centred(clipped, out=self.spare).dot(self.q))
        return math.sqrt(max(cost, 0.0) / self.mass) - self.root_delta

    def _lower_of(self, upper: float) -> float:
        """Return a with Σ(aq − p)₊ = Σ(p − bq)₊, tokens with q = 0 counted."""
        cut = -self._moved_mass(None, upper)
        start, steepness = self.last_search
        start, high = max(start, NEAREST * self.unit), self.unit * (1 + self.precision.slack)
        root = RisingRoot(self.precision.least, high, start, self.precision.settled, steepness)
        while not root.done:
            root.tell(_log_ratio(self._moved_mass(root.x, None), cut))
        self.last_search = root.x, root.steepness
        return root.x

    def _moved_mass(self, lower: float | None, upper: float | None) -> float:
        """Return Σ q (clip(p/q) − p/q)."""
        clipped = torch.clamp(self.ratio, lower, upper, out=self.clipped)
        return float(clipped.sub_(self.ratio).dot(self.q))


def _log_ratio(one: float, other: float) -> float:
    """Return ln(one/other) of two numbers that may be 0, 0 if both are."""
    if one > 0 and other > 0:
        return math.log(one / other)
    return 0.0 if one == other else math.copysign(math.inf, one - other)


class _RowMemory:
    """Memory for p/q and a clipped row of ``count``, part by part, for one row at a time.

    Results of one part are written over those of the part before, so that they stay near the
    core.
    """

    def __init__(self, count: int, precision: Precision) -> None:
        self.key = count, precision.dtype
        ratio = scratch("soft_row", (count,), precision.dtype).numpy()
        part = precision.part
        clipped = scratch("soft_row.part", (min(count, part),), precision.dtype).numpy()
        rows = (ratio[i : i + part] for i in range(0, count, part))
        self.parts = [(row, clipped[: len(row)]) for row in rows]


def _memory_for(user: SoftRow, count: int, precision: Precision) -> list[tuple[Row, Row]]:
    """Return this thread's memory, or another if a row that is still there uses it."""
    memory, last_user = getattr(_thread, "last", _NOBODY)
    if memory is None or memory.key != (count, precision.dtype) or last_user() is not None:
        memory = _RowMemory(count, precision)
    _thread.last = memory, weakref.ref(user)
    return memory.parts


_NOBODY: Any = None, None
_thread = threading.local()
_PRECISIONS = {
    np.dtype(str(dtype).partition(".")[2]): precision for dtype, precision in PRECISIONS.items()
}
