r"""The band of one row, for decisions: in numpy, whose calls cost less than the arithmetic.

A token n with coin u is accepted iff u p_n < b q_n, that is iff r = u p_n/q_n is below the band's
upper edge b, and the first look is at r itself: only a refusal needs the band, for the residual
(aq − p)₊ (THEORY.md, Theorem 15).

At a price ν, in tokens per unit of divergence, a row is that of a node of a drafted path, which is
reached with an alive ratio P (:class:`cactus_theory.policies.Path`), and by itself that of P = 1.
What is emitted there is g = P h with the band of p/P (Theorem 13, for later tokens that are worth
nothing):

.. math:: h = \max\{a q,\; \min(u q,\; p/P)\}, \qquad f'(u) − f'(a) = 1/ν.

In terms of ρ = p/q and the edges U = P u and A = P a that is g/q = max(A, min(U, ρ)), which rises
with the edges: a root of one rising function.

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

from cactus_theory.base.reused_memory import scratch
from cactus_theory.base.roots import rising_root
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.certificate import geometry_of
from cactus_theory.optimum.edges import solve_edges
from cactus_theory.optimum.sorted_path import PerRow, Rows

Row = np.ndarray
# most rows solved one by one where edges are multiples of each other: faster than all at once
FEW_ROWS = 32
# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0
# relative step at which the edges of float64 rows count as found
SETTLED = 2e-14
# least level of a search: float64, whatever the dtype of the rows
LOWEST = 1e-290
# share of the largest p/q from which an edge gives visible mass to tokens with q = 0
SMALL = 1e-12
# the first step's estimate of x E′(x), the mass outside the band: where edges are multiples of
# each other, and elsewhere. Fewest steps on random rows and in decodes of the shipped pair
STRAIGHT, STEEP = 0.8, 0.4
# estimate of x S′(x)/S, S(x) = Σ(xq − p)₊ the mass below the lower edge: 1 to 5 on such rows
RISE = 2.0
# least start of the next search, in Σp/Σq: a is 0 where nothing was cut
NEAREST = 1e-3


class Precision(NamedTuple):
    """Precision of the edges in a dtype."""

    dtype: torch.dtype
    # floor of q, about the least normal number: with it p/q stays finite
    least: float
    # largest p/q, about 1/least: only such a q, or an infinite edge, gives a larger one
    most: float
    # relative error allowed in a row's sum, and so the distance of an edge beyond its limits
    slack: float
    # relative size of the last secant step: two units of rounding, as the functions have a kink
    # where an edge passes a token, and the error after a step across one is a share of the step
    settled: float
    # size of the last step where the edges are multiples of each other (KL at a price): with 100
    # times ``settled`` the emitted law of float32 rows is as close
    settled_multiples: float
    # most products in one sum, which loses its last digits; the softmax of a longer row may miss 1
    # by more. Longer float32 rows are summed in parts, longer float64 rows by torch, as OpenBLAS
    # gives a dot of more than 10,000 entries to its threads, which compete with torch's
    part: int


# the precision of each dtype that rows are decided in
PRECISIONS = {
    precision.dtype: precision
    for precision in (
        Precision(torch.float32, 1.2e-38, 8e37, 2e-4, 2e-7, 2e-5, 16384),
        Precision(torch.float64, 2.3e-308, 4e307, 2e-9, SETTLED, SETTLED, 8192),
    )
}
_PRECISIONS = {
    np.dtype(str(dtype).partition(".")[2]): precision for dtype, precision in PRECISIONS.items()
}


def ratio_in(drafted: float, q_n: float) -> float:
    """Return drafted/q_n of a token, ∞ where q_n is too small for it to rise."""
    return drafted / q_n if q_n >= PRECISIONS[torch.float64].least else math.inf


class PricedBand:
    """Constants of the bands of all rows at a price; a ≤ 1 ≤ u.

    ``step`` is f′(u) − f′(a) = 1/ν, ``high`` a bound on u, ∞ where f′(∞) is no further; ``drop`` is
    A/U where edges are multiples of each other, else None.
    """

    def __init__(self, f: FDivergence, price: float) -> None:
        if f.scale_free:  # a higher price may accept everything
            price = max(price, 1 / FURTHEST)
        self.f, self.price, self.step = f, price, 1 / price
        self.high = f.upper_edge(1.0, self.step)
        self.drop = f.lower_edge(1.0, self.step) if f.scale_free else None

    def edges(self, level: float, unit: float, largest: float) -> tuple[float, float]:
        """Return U and A where the search is at ``level``: U, up to the ``largest`` p/q.

        Beyond it nothing is cut, and what still lacks is lifted: up to twice the largest p/q, A
        rises to P in proportion. ``unit`` is P in the row's units.
        """
        if self.drop is not None:
            return level, level * self.drop
        lower = unit * self.f.lower_edge(min(level, largest) / unit, self.step)
        if level <= largest:
            return level, lower
        return math.inf, lower + (level / largest - 1) * (unit - lower)


class _SolvedRow:
    """A row whose band is solved if a token is refused: then ``upper`` and ``scale`` are U and A.

    ``unit`` is P in the row's units, Σp/Σq of a row by itself, and ``target`` is q.
    """

    precision: Precision
    target: Row
    unit: float
    settled: float
    steepness, straight = math.inf, False
    upper = math.inf
    scale: float

    def passes(self, threshold: float) -> bool:
        """Return whether U > ``threshold``; if not, ``upper`` and ``scale`` are solved."""
        if threshold <= self.unit * (1 - self.precision.slack):
            return True
        low, high, start = self._bracket(threshold)
        value = self.excess(start)
        if value < 0 and start == threshold:
            return True
        steps = self.settled, self.steepness, self.straight, value
        level, _ = rising_root(self.excess, low, high, start, *steps)
        self.upper, self.scale = self._edges(level)
        return self.upper > threshold

    def excess(self, level: float) -> float:
        """Return a function of U at ``level`` that rises with U and is 0 at the band."""
        raise NotImplementedError

    def _bracket(self, threshold: float) -> tuple[float, float, float]:
        """Return two levels around the root, and the level to start from."""
        raise NotImplementedError

    def _edges(self, level: float) -> tuple[float, float]:
        """Return U and A at a level."""
        raise NotImplementedError


class PricedRow(_SolvedRow):
    """p/q of one row in the row's precision, and its band at a price.

    The sums of a short row count as 1 where that moves no decision, unless ``exact``. Where tokens
    are ``deterministic`` the band is that of the selection law of these and one sampled from p, 0
    for none: min(p, cq), and cq at deterministic tokens, c such that its sum is that of p. Off the
    ``head``, tokens with q ≥ head · max q, nothing rises.

    ``total`` is Σ g in the units of p; ``cap`` is c, ∞ where no deterministic token has q > 0 or
    the band does not depend on it; ``scale`` is P a, that of the residual.
    """

    def __init__(
        self,
        q: Row,
        p: Row,
        alive: float,
        band: PricedBand,
        exact: bool = False,
        deterministic: Sequence[int] = (),
        head: float = 0.0,
    ) -> None:
        if band.high == math.inf and q.dtype == np.float32:
            if ((q > 0) & (q < _PRECISIONS[q.dtype].least)).any():  # denormal q may rise, too
                q, p = q.astype(np.float64), p.astype(np.float64)
        self.band, self.precision = band, _PRECISIONS[q.dtype]
        self.target, self.unit, self.total = q, alive, alive
        self.straight = band.drop is not None
        self.settled, self.steepness = self.precision.settled, STEEP
        if self.straight:
            self.settled, self.steepness = self.precision.settled_multiples, STRAIGHT
        safe = q
        if q.min() < self.precision.least:
            safe = scratch("row.q", (len(q),), self.precision.dtype).numpy()
            np.maximum(q, self.precision.least, out=safe)
        self.ratio, self.clipped = _memory_for(self, len(q), self.precision)
        self.safe, self.short = safe, len(q) <= self.precision.part
        np.divide(p, safe, out=self.ratio)
        if exact or band.high == math.inf or not self.short:
            mass, drafted = (float(torch.from_numpy(row).sum()) for row in (q, p))
            drafted = drafted or mass
            # a row without mass, or with ∞, is refused where a token is drawn from it
            mass = 1.0 if mass <= 0 or mass == math.inf else mass
            self.unit, self.total = alive * drafted / mass, alive * drafted
        self.scale, self.cap, self.largest = self.unit, math.inf, math.inf
        reached = [token for token in deterministic if q[token] > 0]
        capped = bool(reached) and not self.straight
        if head:  # off the head p/q is cut at P
            least = np.float64(head * float(q.max()))
            np.minimum(self.ratio, self.unit, out=self.ratio, where=q < least)
        if capped or band.high * self.unit >= SMALL * self.precision.most:
            self._exclude()
        for token in reached:  # under KL the band is the same for p = ∞ as for cq, as U ≤ c
            self.ratio[token] = self.precision.most
        if capped:
            self.cap = self._level(alive)
            np.minimum(self.ratio, self.cap, out=self.ratio)

    def _exclude(self) -> None:
        """Set p/q to 0 at tokens whose q counts as ``least``: a large edge would raise them."""
        self.ratio *= self.target >= self.precision.least

    def _level(self, alive: float) -> float:
        """Return c, at which Σ min(p, cq) is Σ p: Newton from below, exact once no token joins."""
        level, before, whole = self.unit / alive, math.inf, self.total / alive
        while True:
            above = _dot(self.safe, self.ratio > level)
            if not 0 < above < before:  # true of NaN, too
                return min(level, self.precision.most)
            lacking = whole - self.beyond(level, 0.0) - self.total
            level, before = level + max(lacking, 0.0) / above, above

    def beyond(self, upper: float, lower: float) -> float:
        """Return Σ g − P at the edges U and A, which rises with both."""
        top = max(min(upper, self.precision.most), lower)
        if self.short:  # the branches of _clip and _dot would cost more
            return float(self.ratio.clip(lower, top, self.clipped).dot(self.safe)) - self.total
        return _dot(_clip(self.ratio, lower, top, self.clipped), self.safe) - self.total

    def excess(self, level: float) -> float:
        """Return Σ g − P."""
        return self.beyond(*self.band.edges(level, self.unit, self.largest))

    def _edges(self, level: float) -> tuple[float, float]:
        return self.band.edges(level, self.unit, self.largest)

    def _bracket(self, threshold: float) -> tuple[float, float, float]:
        unit, slack = self.unit, self.precision.slack
        low, high = max(unit * (1 - slack), LOWEST), self.band.high * unit
        if high == math.inf:
            self.largest = max(unit, float(self.ratio.max()))
            high = 2 * self.largest
        high *= 1 + slack
        return low, high, threshold if low < threshold < high else math.sqrt(low * high)

    def write(self, row: Row) -> None:
        """Solve the band, and write g in the units of p: 0 where q = 0."""
        self.passes(math.inf)
        top = max(min(self.upper, self.precision.most), self.scale)
        np.multiply(_clip(self.ratio, self.scale, top, self.clipped), self.target, out=row)

    def ratio_of(self, ratio: float, deterministic: bool = False) -> float:
        """Return g_n/p_n of a sampled token with this p_n/q_n, once solved."""
        if ratio == 0:
            return math.inf
        if ratio == math.inf:
            return 0.0
        return (self.raised if deterministic else self._raised(min(ratio, self.cap))) / ratio

    @property
    def raised(self) -> float:
        """Return g/q of deterministic tokens, once solved; arbitrary where none has q > 0."""
        raised = self._raised(self.cap)
        return raised if raised < math.inf else self.scale

    def _raised(self, ratio: float) -> float:
        """Return g/q of a token with this p/q."""
        return max(self.scale, min(self.upper, ratio))


class BudgetRow(_SolvedRow):
    """The band of a row within a budget; in torch, as long rows cost most in their logarithms.

    Σ(aq − p)₊ = Σ(p − bq)₊ gives the a that belongs to b, and D rises with b. The search is for
    √D = √δ: D is flat at b = 1, so that secants in D would end too early at small δ. The sums are
    of differences that are 0 inside the band, so that the edges are as precise as the row.
    """

    def __init__(self, q: Row, p: Row, f: FDivergence, delta: float) -> None:
        self.target, draft = q, torch.from_numpy(p)
        target = torch.from_numpy(q)
        precision = self.precision = PRECISIONS[target.dtype]
        memory = scratch("row.budget", (4, len(q)), precision.dtype)
        self.q = torch.clamp(target, min=precision.least, out=memory[0])
        self.ratio = torch.div(draft, self.q, out=memory[1])
        self.clipped, self.spare = memory[2], memory[3]
        mass, drafted = (float(row.sum(dtype=torch.float64)) for row in (target, draft))
        # a row without mass, or with ∞, is refused where a token is drawn from it
        self.mass = 1.0 if mass <= 0 or mass == math.inf else mass
        self.unit = self.scale = drafted / self.mass
        self.f, self.root_delta, self.settled = f, math.sqrt(delta), precision.settled
        # a at the end of the last search, and the steepness there
        self.last_search = self.unit / 2, RISE

    def _bracket(self, threshold: float) -> tuple[float, float, float]:
        most, slack = float(self.ratio.amax()), self.precision.slack
        if most > self.precision.most:
            inside = torch.from_numpy(self.target >= self.precision.least)
            most = float((self.ratio * inside).amax())
        low, high = self.unit * (1 - slack), max(most, self.unit) * (1 + slack)
        return low, high, min(threshold, high)

    def _edges(self, level: float) -> tuple[float, float]:
        return level, self._lower_of(level)

    def excess(self, level: float) -> float:
        """Return √D − √δ of the band with this upper edge."""
        lower = self._lower_of(level)
        clipped = torch.clamp(self.ratio, lower, level, out=self.clipped).div_(self.unit)
        cost = float(self.f.centred(clipped, out=self.spare).dot(self.q))
        return math.sqrt(max(cost, 0.0) / self.mass) - self.root_delta

    def _lower_of(self, upper: float) -> float:
        """Return a with Σ(aq − p)₊ = Σ(p − bq)₊, tokens with q = 0 counted."""
        cut = -self._moved_mass(None, upper)
        start, steepness = self.last_search
        start, high = max(start, NEAREST * self.unit), self.unit * (1 + self.precision.slack)
        search = self.precision.least, high, start, self.settled, steepness
        self.last_search = rising_root(
            lambda lower: _log_ratio(self._moved_mass(lower, None), cut), *search
        )
        return self.last_search[0]

    def _moved_mass(self, lower: float | None, upper: float | None) -> float:
        """Return Σ q (clip(p/q) − p/q)."""
        clipped = torch.clamp(self.ratio, lower, upper, out=self.clipped)
        return float(clipped.sub_(self.ratio).dot(self.q))


def _clip(row: Row, lower: float, upper: float, out: Row) -> Row:
    """Return ``row`` clipped into ``out``; torch clips a long row in two thirds of numpy's time."""
    if len(row) <= _PRECISIONS[row.dtype].part:
        return row.clip(lower, upper, out)
    torch.clamp(torch.from_numpy(row), lower, upper, out=torch.from_numpy(out))
    return out


def _dot(one: Row, other: Row) -> float:
    """Return Σ one·other in the precision of ``one``."""
    part = _PRECISIONS[one.dtype].part
    if len(one) <= part:
        return float(one.dot(other))
    if one.dtype == np.float64:
        return float(torch.dot(*map(torch.from_numpy, (one, other.astype(one.dtype, copy=False)))))
    return sum(float(one[i : i + part].dot(other[i : i + part])) for i in range(0, len(one), part))


def _log_ratio(one: float, other: float) -> float:
    """Return ln(one/other) of two numbers that may be 0, 0 if both are."""
    if one > 0 and other > 0:
        return math.log(one / other)
    return 0.0 if one == other else math.copysign(math.inf, one - other)


@torch.no_grad()
def path_rows(q: Rows, p: Rows, alive: PerRow, band: PricedBand) -> Rows:
    """Return the rows h at nodes with these P, float64, which sum to 1; nothing where q = 0.

    A row that is reached with P = 0 never occurs; it is taken for P = 1.
    """
    q, p, alive = q.double(), p.double(), torch.where(alive > 0, alive.double(), 1.0)
    rows = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    if q.device.type == "cpu" and len(q) <= (FEW_ROWS if band.drop is not None else 1):
        for own in zip(rows.numpy(), q.numpy(), p.numpy(), alive.tolist(), strict=True):
            PricedRow(*own[1:], band, exact=True).write(own[0])
    else:
        totals = q.sum(-1, keepdim=True), alive[:, None] * p.sum(-1, keepdim=True)
        target, draft = scratch("row.both", (2, *q.shape), device=q.device)
        q, p = torch.div(q, totals[0], out=target), torch.div(p, totals[1], out=draft)
        geometry = geometry_of(q, p, band.f, lacking=1 - 1 / alive)
        bands = solve_edges(geometry, "price", torch.full_like(alive, band.price))
        geometry.write_rows(bands, rows)
    return rows.div_(rows.sum(-1, keepdim=True))


def _memory_for(user: PricedRow, count: int, precision: Precision) -> tuple[Row, Row]:
    """Return memory for p/q and a clipped row: this thread's, or new if a row still uses that."""
    key = (count,), precision.dtype
    last, memory, last_user = getattr(_thread, "last", _NOBODY)
    if last != key or last_user() is not None:
        memory = scratch("row.ratio", *key).numpy(), scratch("row.clipped", *key).numpy()
    _thread.last = key, memory, weakref.ref(user)
    return memory


_NOBODY: Any = None, None, None
_thread = threading.local()
