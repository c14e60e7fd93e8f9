r"""The best row at a node of a drafted path: a soft band, for one normalisation a row.

A node is reached with an alive ratio P (:class:`cactus_theory.policies.Path`). To accept more of
a drafted token x is worth one token, up to r = g_x/p_x = 1, where g = P h is the mass emitted
there. With ν the price of divergence, in tokens per unit,

.. math:: \max_{Σg = P} Σ_x \min(p_x, g_x) − ν D_f(g‖Pq)

has one free number u:

.. math:: h = \max\{a q,\; \min(u q,\; p/P)\}, \qquad f'(u) − f'(a) = 1/ν,

the band of p/P. In terms of ρ = p/q and the edges U = P u and A = P a the row is
g/q = max(A, min(U, ρ)), which rises with the edges: a root of one rising function.
Source: THEORY.md, Theorem 13, for later tokens that are worth nothing.
"""

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.roots import RisingRoot

Rows = Float[Tensor, "rows vocab"]
# U and A of one row, and who looks for them
Edges = tuple[float, float]
Search = Generator[Edges, float, Edges | None]
# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0
# x E′(x) is the mass outside the band, 0.3 to 1 on rows of language models
STEEPNESS = 0.9
# where f′ is flat, a little of the free number may be much of u: it is settled to this
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
    # entries of a long row that are worked on at once: they stay near the core, and sums of so many
    # products are right to the last few digits; the softmax of a longer row may miss 1 by more.
    # OpenBLAS gives a float64 dot of more than 10,000 entries to its threads, which fight torch's
    part: int


# the dtypes that rows are decided in
PRECISIONS = {
    precision.dtype: precision
    for precision in (
        Precision(torch.float32, 1e-30, 1e25, 2e-4, 2e-7, 2e-5, 1e-7, 16384),
        Precision(torch.float64, 1e-290, 1e280, 2e-9, SENSITIVE, SENSITIVE, 1e-16, 8192),
    )
}


class PricedBand:
    """What the bands of all rows have in common at a price; a ≤ 1 ≤ u.

    The free number is u, or t in [1, 2], linear in f′(a), where f′(∞) = ∞ and edges are no
    multiples of each other, ``steep``: there u may be all but 1 while a is far below.

    ``step`` is f′(u) − f′(a) = 1/ν, ``high`` a bound on u. ``flat``: f′(∞) is finite; ``drop`` is
    A/U where edges are multiples of each other, else None.
    """

    def __init__(self, f: FDivergence, price: float) -> None:
        if f.scale_free:  # one may well accept everything at a higher price
            price = max(price, 1 / FURTHEST)
        self.f, self.step = f, 1 / price
        self.high = f.upper_edge(1.0, self.step)
        self.steep = not f.scale_free and f.slope_at_infinity == math.inf
        self.flat = not (self.steep or f.scale_free)
        self.drop = f.lower_edge(1.0, self.step) if f.scale_free else None

    def edges(self, level: float, unit: float) -> Edges:
        """Return U and A for U = ``level``; ``unit`` is P in the row's units."""
        if self.drop is not None:
            return level, level * self.drop
        return level, unit * self.f.lower_edge(level / unit, self.step)

    def by_slope(self, place: float, unit: float) -> Edges:
        """Return the same for t = ``place``: u = 1 at 1, a = 1 at 2."""
        low = (place - 1) * self.step - self.step
        upper, lower = (self.f.upper_edge(1.0, slope) for slope in (low + self.step, low))
        return unit * upper, unit * lower

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
        """Look for a row's edges: yield some, take Σ g − P there; None if U > ``threshold``.

        The first level tried is ``threshold``, ``start`` or the middle of the bracket. ``close``
        ends the search where Σ g is right up to rounding. Where f′(∞) is finite, U may be above
        every ratio, the ``largest`` one too. If even all of the draft's mass within the target's
        support is too little, the row is max(A, p/q), of A.
        """
        low, high, slack = unit, self.high * unit, precision.slack
        if threshold <= low * (1 - slack):
            return None
        shape = self.edges
        if self.steep:
            if threshold < high and (yield shape(threshold, unit)) < 0:
                return None
            shape, threshold = self.by_slope, math.nan
            settled = SENSITIVE / max(self.step, 1.0)
            root = RisingRoot(1 - slack, 2 + slack, 1.5, settled, STEEPNESS)
        elif high == math.inf and (yield shape(high := max(largest(), unit), unit)) < 0:
            if threshold <= high:
                return None
            least, settled = max(shape(high, unit)[1], LOWEST), precision.settled
            shape, threshold = _uncut, math.nan
            root = RisingRoot(least, unit * (1 + slack), unit, settled, steepness, True)
        else:
            low, high = max(low * (1 - slack), LOWEST), high * (1 + slack)
            start = threshold if low < threshold < high else start or math.sqrt(low * high)
            straight = self.drop is not None
            settled = precision.settled_multiples if straight else precision.settled
            root = RisingRoot(low, high, start, settled, steepness, straight)
        while not root.done:
            value = yield shape(root.x, unit)
            if value < 0 and root.x == threshold:
                return None
            if self.steep and abs(value) <= close:
                break
            root.tell(value)
        return shape(root.x, unit)


def _uncut(lower: float, unit: float) -> Edges:
    """Return the edges where nothing of the draft is cut, for A = ``lower``."""
    return math.inf, lower


class SoftBands:
    """The soft bands of rows q and p (N, V) float64, solved together, on any device."""

    def __init__(self, q: Rows, p: Rows, alive: Sequence[float], band: PricedBand) -> None:
        self.band, self.precision, self.single = band, PRECISIONS[q.dtype], len(q) == 1
        memory = scratch("soft", (3, *q.shape), q.dtype, q.device).unbind(0)
        self.q = torch.clamp(q, min=self.precision.least, out=memory[0])
        self.ratio = torch.div(p, self.q, out=memory[1]).mul_(q > 0)
        self.out = memory[2]
        mass, draft = (row.sum(-1, dtype=torch.float64).tolist() for row in (q, p))
        sums = list(zip(alive, draft, mass, strict=True))
        # P in the row's units, and g in the units of p: Σ g = P Σ p
        self.units = [ratio * (drafted / whole) for ratio, drafted, whole in sums]
        self.totals = [ratio * drafted for ratio, drafted, _ in sums]

    def shaped(self, edges: Sequence[Edges]) -> Rows:
        """Return g/q, in memory that the next call reuses."""
        most = self.precision.most
        if self.single:
            ((upper, lower),) = edges
            return torch.clamp(self.ratio, lower, max(min(upper, most), lower), out=self.out)
        columns = torch.tensor(edges, dtype=self.q.dtype, device=self.q.device).T[..., None]
        columns.clamp_(max=most)
        out = torch.minimum(self.ratio, columns[0], out=self.out)
        return torch.maximum(out, columns[1], out=out)

    def solved(self) -> list[Edges]:
        """Return the edges of every row."""
        searches = {
            row: self.band.search(
                unit, self.precision, lambda ratio=ratio: float(ratio.amax()), start=unit
            )
            for row, (ratio, unit) in enumerate(zip(self.ratio, self.units, strict=True))
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
def soft_rows(q: Rows, p: Rows, alive: Float[Tensor, "rows"], band: PricedBand) -> Rows:
    """Return the rows h, float64, which sum to 1; nothing where q = 0. P is ``alive``, by row.

    A row that is reached with P = 0 never occurs; it is taken for P = 1.
    """
    q, p = q.double(), p.double()
    bands = SoftBands(q, p, torch.where(alive > 0, alive, 1.0).tolist(), band)
    mass = bands.shaped(bands.solved()).mul(q)
    return mass / mass.sum(-1, keepdim=True)
