r"""The best row at a node of a drafted path: the band of p/P, for one normalisation a row.

A node is reached with an alive ratio P (:class:`cactus_theory.policies.Path`). To accept more of
a drafted token x is worth one token, up to r = g_x/p_x = 1, where g = P h is the mass emitted
there. With ν the price of divergence, in tokens per unit,

.. math:: \max_{Σg = P} Σ_x \min(p_x, g_x) − ν D_f(g‖Pq)

has one free number u:

.. math:: h = \max\{a q,\; \min(u q,\; p/P)\}, \qquad f'(u) − f'(a) = 1/ν,

a band. In terms of ρ = p/q and the edges U = P u and A = P a the row is
g/q = max(A, min(U, ρ)), which rises with the edges: a root of one rising function.
Source: THEORY.md, Theorem 13, for later tokens that are worth nothing.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.path import PerRow, Rows
from cactus_theory.optimum.roots import RisingRoot

# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0
# x E′(x) is the mass outside the band, 0.3 to 1 on rows of language models
STEEPNESS = 0.9
# edges of float64 rows are settled to this
SETTLED = 2e-14
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
        Precision(torch.float64, 1e-290, 1e280, 2e-9, SETTLED, SETTLED, 1e-16, 8192),
    )
}


class PricedBand:
    """What the bands of all rows have in common at a price; a ≤ 1 ≤ u.

    ``step`` is f′(u) − f′(a) = 1/ν, ``high`` a bound on u, ∞ where f′(∞) is no further; ``drop`` is
    A/U where edges are multiples of each other, else None.
    """

    def __init__(self, f: FDivergence, price: float) -> None:
        if f.scale_free:  # one may well accept everything at a higher price
            price = max(price, 1 / FURTHEST)
        self.f, self.step = f, 1 / price
        self.high = f.upper_edge(1.0, self.step)
        self.drop = f.lower_edge(1.0, self.step) if f.scale_free else None

    def lower(self, upper: float, unit: float) -> float:
        """Return A for U = ``upper``; ``unit`` is P in the row's units."""
        if self.drop is not None:
            return upper * self.drop
        return unit * self.f.lower_edge(upper / unit, self.step)

    def edges(self, level: float, unit: float, largest: float) -> tuple[float, float]:
        """Return U and A where the search is at ``level``: U, up to the ``largest`` p/q.

        Beyond it nothing is cut, and what still lacks is lifted: up to twice the largest p/q, A
        rises to P in proportion.
        """
        if level <= largest:
            return level, self.lower(level, unit)
        lower = self.lower(largest, unit)
        return math.inf, lower + (level / largest - 1) * (unit - lower)

    def search(
        self,
        unit: float,
        largest: float,
        precision: Precision,
        start: float,
        steepness: float = STEEPNESS,
    ) -> RisingRoot:
        """Return the search for the level at which Σ g is P; first at ``start``, if it is inside.

        ``largest`` matters where ``high`` is infinite.
        """
        slack, straight = precision.slack, self.drop is not None
        low = max(unit * (1 - slack), LOWEST)
        high = (self.high * unit if self.high < math.inf else 2 * largest) * (1 + slack)
        start = start if low < start < high else math.sqrt(low * high)
        settled = precision.settled_multiples if straight else precision.settled
        return RisingRoot(low, high, start, settled, steepness, straight)


@torch.no_grad()
def soft_rows(q: Rows, p: Rows, alive: Float[Tensor, "rows"], band: PricedBand) -> Rows:
    """Return the rows h, float64, which sum to 1; nothing where q = 0. P is ``alive``, by row.

    All are solved together, on any device. A row that is reached with P = 0 never occurs; it is
    taken for P = 1.
    """
    q, p = q.double(), p.double()
    precision = PRECISIONS[q.dtype]
    memory = scratch("soft", (3, *q.shape), q.dtype, q.device).unbind(0)
    safe = torch.clamp(q, min=precision.least, out=memory[0])
    ratio = torch.div(p, safe, out=memory[1]).mul_(q > 0)
    # g in the units of p, Σ g = P Σ p, and P in the row's units
    totals = torch.where(alive > 0, alive.double(), 1.0) * p.sum(-1)
    units = totals / q.sum(-1)
    bounded = band.high < math.inf
    largest = units.new_full(units.shape, math.inf) if bounded else ratio.amax(-1).maximum(units)
    rows = list(zip(units.tolist(), largest.tolist(), strict=True))
    searches = [band.search(unit, most, precision, start=unit) for unit, most in rows]
    while True:
        levels = [search.x for search in searches]
        if len(q) == 1:
            top, bottom = band.edges(levels[0], *rows[0])
            mass = torch.clamp(ratio, bottom, top, out=memory[2])
        else:
            upper, lower = _edges(band, units.new_tensor(levels), units, largest)
            mass = torch.minimum(ratio, upper[:, None], out=memory[2])
            mass = torch.maximum(mass, lower[:, None], out=memory[2])
        sums = mass.mul_(q).sum(-1)
        if all(search.done for search in searches):
            return mass / sums[:, None]
        for search, excess in zip(searches, (sums - totals).tolist(), strict=True):
            if not search.done:
                search.tell(excess)


def _edges(band: PricedBand, level: PerRow, unit: PerRow, largest: PerRow) -> tuple[PerRow, PerRow]:
    """Return :meth:`PricedBand.edges` of many rows."""
    if band.drop is not None:
        return level, level * band.drop
    upper = torch.minimum(level, largest)
    lower = unit * band.f.ratio_at(band.f.slope(upper / unit) - band.step)
    return upper, lower + (level / largest - 1).clamp(min=0.0) * (unit - lower)
