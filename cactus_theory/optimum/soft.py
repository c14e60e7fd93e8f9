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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.optimum.decide import (
    LEAST,
    MOST,
    SETTLED,
    SLACK,
    STEEPNESS,
    RisingRoot,
)

Rows = Float[Tensor, "rows vocab"]
# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0


@dataclass(frozen=True)
class Worth:
    """φ of the tokens drafted at one depth: concave, piecewise linear on [0, 1], constant after.

    Attributes
    ----------
    knots : where slopes change, rising, the last one 1.
    slopes : tokens per unit of r up to each knot, falling, none negative.
    """

    knots: tuple[float, ...]
    slopes: tuple[float, ...]

    def of(self, r: Tensor) -> Tensor:
        """Return φ(r) of r ≥ 0, in tokens."""
        value, before = torch.zeros_like(r), 0.0
        for knot, slope in zip(self.knots, self.slopes, strict=True):
            value += slope * (r.clamp(before, knot) - before)
            before = knot
        return value


# one token now and nothing later
ONE_TOKEN = Worth((1.0,), (1.0,))


class Steps:
    """The edges of φ at a price, in one free number; a ≤ 1 ≤ u_1 bounds it.

    It is u_M where that is well conditioned: for u_M ≥ 1, and for KL, whose edges are multiples
    of each other. Elsewhere u_M may be all but 0 (or below what f′ reaches) with u_1 above 1:
    then it is t in [1, 2], linear in f′(a), ``by_slope``. For f′(∞) = ∞ that is always so.

    Attributes
    ----------
    rises, fall : (s_j − s_M)/ν for every j, and s_M/ν.
    low, high : bounds on u_M.
    top : the largest u_1.
    steep : f′(∞) = ∞ and edges are no multiples of each other.
    bent : φ has several slopes and edges are no multiples of each other.
    span : how far f′(a) may go.
    """

    def __init__(self, worth: Worth, f: FDivergence, price: float) -> None:
        last = worth.slopes[-1]
        if f.scale_free:  # one may well accept everything at a higher price
            price = max(price, worth.slopes[0] / FURTHEST)
        self.f, self.fall = f, last / price
        self.rises = [(slope - last) / price for slope in worth.slopes]
        self.reach = self.rises[0] + self.fall
        self.low, self.high = f.lower_edge(1.0, self.rises[0]), f.upper_edge(1.0, self.fall)
        self.top = f.upper_edge(1.0, self.reach)
        self.steep = not f.scale_free and f.slope_at_infinity == math.inf
        self.bent = not f.scale_free and self.rises[0] > 0
        self.span = self.reach if self.steep else self.rises[0]
        self.factors = None
        if f.scale_free:
            self.factors = (
                [f.upper_edge(1.0, own) for own in self.rises],
                f.lower_edge(1.0, last / price),
            )

    def edges(self, level: float, unit: float) -> tuple[list[float], float]:
        """Return U_1, …, U_M and A for U_M = ``level``; ``unit`` is P in the row's units."""
        if self.factors is not None:
            return [level * factor for factor in self.factors[0]], level * self.factors[1]
        at = level / unit
        # far up f′ is flat, so that its inverse would not find its way back to the level
        upper = [unit * self.f.upper_edge(at, own) if own else level for own in self.rises]
        return upper, unit * self.f.lower_edge(at, self.fall)

    def by_slope(self, place: float, unit: float) -> tuple[list[float], float]:
        """Return the same for t = ``place``: u_1 = 1 at 1; at 2 a = 1, or u_M = 1 if not steep."""
        low = (place - 1) * self.span - self.reach
        upper = [unit * self.f.upper_edge(1.0, low + own + self.fall) for own in self.rises]
        return upper, unit * self.f.upper_edge(1.0, low)


class SoftBands:
    """The soft bands of rows q and p (N, V) at a price: evaluated here, solved by the caller."""

    def __init__(
        self,
        q: Rows,
        p: Rows,
        alive: Sequence[float],
        worths: Sequence[Worth],
        f: FDivergence,
        price: float,
    ) -> None:
        self.alive, self.worths, self.f = alive, worths, f
        self.dtype, self.single, self.pieces = q.dtype, len(q) == 1, len(worths[0].knots)
        different = {worth: Steps(worth, f, price) for worth in set(worths)}
        self.steps = [different[worth] for worth in worths]
        self.uncut: set[int] = set()  # rows whose free number is A
        self.sloped: set[int] = set()  # rows whose free number is t
        memory = scratch("soft", (4, *q.shape), q.dtype, q.device).unbind(0)
        self.q = torch.clamp(q, min=LEAST[q.dtype], out=memory[0])
        self.ratio = torch.div(p, self.q, out=memory[1]).mul_(q > 0)
        self.out, self.spare = memory[2:]
        mass, draft = (row.sum(-1, dtype=torch.float64).tolist() for row in (q, p))
        self.scales = [drafted / own for drafted, own in zip(draft, mass, strict=True)]
        # g in the units of p: Σ g = P Σ p
        self.wanted = [own * total for own, total in zip(alive, draft, strict=True)]

    def edges(self, row: int, level: float) -> list[float]:
        """Return U_1, …, U_M and A of a row whose free number is ``level``."""
        if row in self.uncut:
            return [*(math.inf for _ in range(self.pieces)), level]
        steps, unit = self.steps[row], self.alive[row] * self.scales[row]
        find = steps.by_slope if row in self.sloped else steps.edges
        upper, lower = find(level, unit)
        return [*upper, lower]

    def shaped(self, levels: Sequence[float]) -> Rows:
        """Return g/q, in memory that the next call reuses."""
        edges = [self.edges(row, level) for row, level in enumerate(levels)]
        knots = self.worths[0].knots
        if self.single:
            own = [min(edge, MOST[self.dtype]) for edge in edges[0]]
            out = torch.clamp(self.ratio, own[-1], max(own[-2], own[-1]), out=self.out)
            for knot, upper in zip(knots[:-1], own, strict=False):
                piece = torch.clamp(self.ratio, max=upper / knot, out=self.spare).mul_(knot)
                out = torch.maximum(out, piece, out=out)
            return out
        columns = torch.tensor(edges, dtype=self.dtype, device=self.q.device).T[..., None]
        columns.clamp_(max=MOST[self.dtype])
        out = torch.minimum(self.ratio, columns[-2], out=self.out)
        out = torch.maximum(out, columns[-1], out=out)
        for knot, upper in zip(knots[:-1], columns, strict=False):
            piece = torch.minimum(self.ratio, upper / knot, out=self.spare).mul_(knot)
            out = torch.maximum(out, piece, out=out)
        return out

    def excess(self, levels: Sequence[float]) -> list[float]:
        """Return Σ g − P of each row, which rises with its level."""
        sums = self.shaped(levels).mul_(self.q).sum(-1).tolist()
        return [own - wanted for own, wanted in zip(sums, self.wanted, strict=True)]

    def bracket(self, row: int) -> tuple[float, float]:
        """Choose a row's free number; return its bounds, with room for rounding.

        Where f′(∞) is finite, U_M may be above every ratio. If even all of the draft's mass
        within the target's support is too little, the row is max(A, p/q), of A.
        """
        steps, slack = self.steps[row], SLACK[self.dtype]
        unit = self.alive[row] * self.scales[row]
        if steps.steep or (steps.bent and self._sum(row, unit) > self.wanted[row]):
            self.sloped.add(row)
            return 1 - slack, 2 + slack
        low, high = unit * (1.0 if steps.bent else steps.low), unit * steps.high
        if high == math.inf:
            high = max(float(self.ratio[row].amax()), unit)
            if self._sum(row, high) < self.wanted[row]:
                self.uncut.add(row)
                least = max(steps.edges(high, unit)[1], LEAST[self.dtype])
                return least, unit * (1 + slack)
        return max(low * (1 - slack), LEAST[self.dtype]), high * (1 + slack)

    def _sum(self, row: int, level: float) -> float:
        """Return Σ g of one row for U_M = ``level``."""
        upper, lower = self.steps[row].edges(level, self.alive[row] * self.scales[row])
        ratio, knots = self.ratio[row], self.worths[row].knots
        out = torch.full_like(ratio, lower)
        for knot, edge in zip(knots, upper, strict=True):
            out = torch.maximum(out, (ratio * knot).clamp(max=min(edge, MOST[self.dtype])))
        return float(out @ self.q[row])


@torch.no_grad()
def solve_soft(bands: SoftBands) -> list[float]:
    """Return the free number of every row."""
    roots = []
    for row, steps in enumerate(bands.steps):
        low, high = bands.bracket(row)
        start = bands.alive[row] * bands.scales[row]
        settled = SETTLED[bands.dtype]
        if row in bands.sloped:
            start, settled = (low + high) / 2, settled / max(steps.span, 1.0)
        roots.append(RisingRoot(low, high, start, settled, STEEPNESS))
    while not all(root.done for root in roots):
        values = bands.excess([root.x for root in roots])
        for root, value in zip(roots, values, strict=True):
            if not root.done:
                root.tell(value)
    return [root.x for root in roots]


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
    bands = SoftBands(q, p, ratios, worths, f, price)
    mass = bands.shaped(solve_soft(bands)).mul(q)
    return mass / mass.sum(-1, keepdim=True)
