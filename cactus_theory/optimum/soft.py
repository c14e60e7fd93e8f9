r"""The best row at a node of a drafted path: a soft band, for one normalisation a row.

A node is reached with an alive ratio P (:class:`cactus_theory.policies.Path`). To accept more of
a drafted token x is worth a concave function φ of r = g_x/p_x, where g = P h is the mass emitted
there: one token, and what the tokens after it are worth at the alive ratio min(1, r). With ν
the price of divergence, in tokens per unit,

.. math:: \max_{Σg = P} Σ_x p_x φ(g_x/p_x) − ν D_f(g‖Pq), \qquad φ constant from r = 1 on.

With φ piecewise linear, of slope s_j up to the knot r_j (slopes fall, the last knot is 1), the
maximum has one free number u_M and

.. math:: h = \max\{a q,\; \max_j \min(u_j q,\; r_j p/P)\}, \quad
    f'(u_j) − f'(a) = s_j/ν.

One piece of slope 1 is the band of p/P. In terms of ρ = p/q and edges U = P u the row is
g/q = max(A, max_j min(U_j, r_j ρ)), which rises with the edges: a root of one rising function.
Source: THEORY.md, Theorem 13.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.roots import RisingRoot

Rows = Float[Tensor, "rows vocab"]
# U_1, …, U_M and A of one row, and who looks for them
Edges = tuple[list[float], float]
Search = Generator[Edges, float, Edges | None]
# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0
# x E′(x) is the mass outside the band, 0.3 to 1 on rows of language models
STEEPNESS = 0.9
# where f′ is flat, a little of the free number may be much of u_1: it is settled to this
SENSITIVE = 2e-14
# levels are float64 whatever the rows are
LOWEST = 1e-290


class Precision(NamedTuple):
    """What edges are worth in a dtype."""

    dtype: torch.dtype
    # q = 0 counts as this, so that p/q stays finite
    least: float
    # a ratio above this can only come from a q that counts as ``least``, or from an infinite edge
    most: float
    # how far a row's sum may be from 1 (relative), so how far beyond its limits an edge may lie
    slack: float
    # a secant step this small (relative) is the last one: two units of rounding, as the functions
    # have kinks where an edge passes a token, and what a step across one leaves is a share of it
    settled: float
    # the same where the edges are multiples of each other (KL at a price): a hundred times larger
    # steps then leave the emitted law of float32 rows as near
    settled_multiples: float
    # of a sum over a row
    rounding: float


# the dtypes that rows are decided in
PRECISIONS = {
    precision.dtype: precision
    for precision in (
        Precision(torch.float32, 1e-30, 1e25, 2e-4, 2e-7, 2e-5, 1e-7),
        Precision(torch.float64, 1e-290, 1e280, 2e-9, SENSITIVE, SENSITIVE, 1e-16),
    )
}


@dataclass(frozen=True)
class Worth:
    """φ of the tokens drafted at one depth: concave, piecewise linear on [0, 1], constant after."""

    knots: tuple[float, ...]  # where slopes change, rising, the last one 1
    slopes: tuple[float, ...]  # tokens per unit of r up to each knot, falling, none negative

    def of(self, r: Tensor) -> Tensor:
        """Return φ(r) of r ≥ 0, in tokens."""
        value, before = torch.zeros_like(r), 0.0
        for knot, slope in zip(self.knots, self.slopes, strict=True):
            value += slope * (r.clamp(before, knot) - before)
            before = knot
        return value


# one token now and nothing later
ONE_TOKEN = Worth((1.0,), (1.0,))


class Pieces:
    """The edges of φ at a price, in one free number; a ≤ 1 ≤ u_1 bounds it.

    It is u_M where that is well conditioned: for u_M ≥ 1, and for KL, whose edges are multiples
    of each other. Elsewhere u_M may be all but 0 (or below what f′ reaches) with u_1 above 1:
    then it is t in [1, 2], linear in f′(a), ``by_slope``. For f′(∞) = ∞ that is always so.

    ``rises`` and ``fall`` are (s_j − s_M)/ν for every j and s_M/ν, ``low`` and ``high`` bounds on
    u_M, ``top`` the largest u_1, ``span`` how far f′(a) may go. ``steep``: f′(∞) = ∞ and edges are
    no multiples of each other; ``flat``: f′(∞) is finite; ``bent``: φ has several slopes and edges
    are no multiples of each other. ``drop`` is A/U_1 where φ has one piece and edges are multiples
    of each other, else None.
    """

    def __init__(self, worth: Worth, f: FDivergence, price: float) -> None:
        last, self.knots, self.bends = worth.slopes[-1], worth.knots, worth.knots[:-1]
        if f.scale_free:  # one may well accept everything at a higher price
            price = max(price, worth.slopes[0] / FURTHEST)
        self.f, self.fall = f, last / price
        self.rises = [(slope - last) / price for slope in worth.slopes]
        self.slope_range = self.rises[0] + self.fall
        self.low, self.high = f.lower_edge(1.0, self.rises[0]), f.upper_edge(1.0, self.fall)
        self.top = f.upper_edge(1.0, self.slope_range)
        self.steep = not f.scale_free and f.slope_at_infinity == math.inf
        self.flat = not (self.steep or f.scale_free)
        self.bent = not f.scale_free and self.rises[0] > 0
        self.span = self.slope_range if self.steep else self.rises[0]
        self.factors = None
        if f.scale_free:
            self.factors = (
                [f.upper_edge(1.0, rise) for rise in self.rises],
                f.lower_edge(1.0, last / price),
            )
        self.drop = self.factors[1] if self.factors is not None and not self.bends else None

    def edges(self, level: float, unit: float) -> Edges:
        """Return U_1, …, U_M and A for U_M = ``level``; ``unit`` is P in the row's units."""
        if self.drop is not None:
            return [level], level * self.drop
        if self.factors is not None:
            return [level * factor for factor in self.factors[0]], level * self.factors[1]
        at = level / unit
        # far up f′ is flat, so that its inverse would not find its way back to the level
        upper = [unit * self.f.upper_edge(at, rise) if rise else level for rise in self.rises]
        return upper, unit * self.f.lower_edge(at, self.fall)

    def by_slope(self, place: float, unit: float) -> Edges:
        """Return the same for t = ``place``: u_1 = 1 at 1; at 2 a = 1, or u_M = 1 if not steep."""
        low = (place - 1) * self.span - self.slope_range
        upper = [unit * self.f.upper_edge(1.0, low + rise + self.fall) for rise in self.rises]
        return upper, unit * self.f.upper_edge(1.0, low)

    def uncut(self, lower: float, unit: float) -> Edges:
        """Return the same where nothing of the draft is cut, for A = ``lower``."""
        return [math.inf] * len(self.knots), lower

    def search(
        self,
        unit: float,
        precision: Precision,
        largest: Callable[[], float],
        threshold: float = math.inf,
        start: float | None = None,
        steepness: float = STEEPNESS,
        close: float = 0.0,
    ) -> Search:
        """Look for a row's edges: yield some, take Σ g − P there; None if U_M > ``threshold``.

        The first level tried is ``threshold``, ``start`` or the middle of the bracket. ``close``
        ends the search where Σ g is right up to rounding. Where f′(∞) is finite, U_M may be above
        every ratio, the ``largest`` one too. If even all of the draft's mass within the target's
        support is too little, the row is max(A, p/q), of A.
        """
        low, high, slack = self.low * unit, self.high * unit, precision.slack
        if threshold <= low * (1 - slack):
            return None
        shape, root = self.edges, None
        if not (self.steep or self.bent):
            close = 0.0
        if high == math.inf:
            high = max(largest(), unit)
            if (yield shape(high, unit)) < 0:
                if threshold <= high:
                    return None
                least = max(shape(high, unit)[1], LOWEST)
                root = RisingRoot(
                    least, unit * (1 + slack), unit, precision.settled, steepness, True
                )
                shape, close, threshold = self.uncut, 0.0, math.nan
        if root is None and (self.steep or self.bent):
            if threshold < high and (yield shape(threshold, unit)) < 0:
                return None
            if self.steep or (yield shape(unit, unit)) > 0:
                settled = SENSITIVE / max(self.span, 1.0)
                root = RisingRoot(1 - slack, 2 + slack, 1.5, settled, STEEPNESS)
                shape, threshold = self.by_slope, math.nan
            low = unit
        if root is None:
            low, high = max(low * (1 - slack), LOWEST), high * (1 + slack)
            start = threshold if low < threshold < high else start or math.sqrt(low * high)
            settled = precision.settled if self.drop is None else precision.settled_multiples
            settled = SENSITIVE if self.bent else settled
            root = RisingRoot(low, high, start, settled, steepness, self.factors is not None)
        while not root.done:
            value = yield shape(root.x, unit)
            if value < 0 and root.x == threshold:
                return None
            if abs(value) <= close:
                break
            root.tell(value)
        return shape(root.x, unit)


class SoftBands:
    """The soft bands of rows q and p (N, V) float64, solved together, on any device."""

    def __init__(self, q: Rows, p: Rows, alive: Sequence[float], pieces: Sequence[Pieces]) -> None:
        self.pieces, self.precision, self.single = pieces, PRECISIONS[q.dtype], len(q) == 1
        memory = scratch("soft", (4, *q.shape), q.dtype, q.device).unbind(0)
        self.q = torch.clamp(q, min=self.precision.least, out=memory[0])
        self.ratio = torch.div(p, self.q, out=memory[1]).mul_(q > 0)
        self.out, self.spare = memory[2:]
        mass, draft = (row.sum(-1, dtype=torch.float64).tolist() for row in (q, p))
        sums = list(zip(alive, draft, mass, strict=True))
        # P in the row's units, and g in the units of p: Σ g = P Σ p
        self.units = [ratio * (drafted / whole) for ratio, drafted, whole in sums]
        self.totals = [ratio * drafted for ratio, drafted, _ in sums]

    def shaped(self, edges: Sequence[Edges]) -> Rows:
        """Return g/q, in memory that the next call reuses."""
        knots, most = self.pieces[0].knots, self.precision.most
        if self.single:
            ((upper, lower),) = edges
            out = torch.clamp(self.ratio, lower, max(min(upper[-1], most), lower), out=self.out)
            for knot, edge in zip(knots[:-1], upper, strict=False):
                piece = torch.clamp(self.ratio, max=min(edge, most) / knot, out=self.spare)
                out = torch.maximum(out, piece.mul_(knot), out=out)
            return out
        flat = [[*upper, lower] for upper, lower in edges]
        columns = torch.tensor(flat, dtype=self.q.dtype, device=self.q.device).T[..., None]
        columns.clamp_(max=most)
        out = torch.minimum(self.ratio, columns[-2], out=self.out)
        out = torch.maximum(out, columns[-1], out=out)
        for knot, edge in zip(knots[:-1], columns, strict=False):
            piece = torch.minimum(self.ratio, edge / knot, out=self.spare)
            out = torch.maximum(out, piece.mul_(knot), out=out)
        return out

    def solved(self) -> list[Edges]:
        """Return the edges of every row."""
        searches = {
            row: pieces.search(
                unit, self.precision, lambda ratio=ratio: float(ratio.amax()), start=unit
            )
            for row, (ratio, pieces, unit) in enumerate(
                zip(self.ratio, self.pieces, self.units, strict=True)
            )
        }
        edges: list[Any] = [None] * len(searches)
        excess: list[Any] = [None] * len(searches)
        while searches:
            for row, search in tuple(searches.items()):
                try:
                    edges[row] = search.send(excess[row])
                except StopIteration as end:
                    edges[row] = end.value
                    del searches[row]
            if searches:
                sums = self.shaped(edges).mul_(self.q).sum(-1).tolist()
                excess = [mass - total for mass, total in zip(sums, self.totals, strict=True)]
        return edges


@torch.no_grad()
def soft_rows(
    q: Rows,
    p: Rows,
    alive: Float[Tensor, "rows"],
    worths: Sequence[Worth],
    f: FDivergence,
    price: float,
) -> Rows:
    """Return the rows h, float64, which sum to 1; nothing where q = 0. All arguments by row.

    A row that is reached with P = 0 never occurs; it is taken for P = 1.
    """
    q, p = q.double(), p.double()
    ratios = torch.where(alive > 0, alive, 1.0).tolist()
    pieces = {worth: Pieces(worth, f, price) for worth in set(worths)}
    bands = SoftBands(q, p, ratios, [pieces[worth] for worth in worths])
    mass = bands.shaped(bands.solved()).mul(q)
    return mass / mass.sum(-1, keepdim=True)
