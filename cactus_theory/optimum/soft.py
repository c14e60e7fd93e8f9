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


@dataclass(frozen=True)
class SoftEdges:
    """The edges of N soft bands.

    Attributes
    ----------
    whole : whether the asked token is accepted for sure (r ≥ 1), so that nothing was solved.
    levels : U_M of each row, arbitrary where ``whole``.
    """

    whole: list[bool]
    levels: list[float]


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
        self.steps = [steps_of(worth, price) for worth in worths]
        self.same = [
            [f.upper_edge(1.0, step) for step in own[:-1]] + [f.lower_edge(1.0, own[-1])]
            for own in (self.steps if f.scale_free else [])
        ]
        memory = scratch("soft", (4, *q.shape), q.dtype, q.device).unbind(0)
        self.q = torch.clamp(q, min=LEAST[q.dtype], out=memory[0])
        self.ratio = torch.div(p, self.q, out=memory[1])
        self.out, self.spare = memory[2:]
        self.target = q
        mass, draft = (row.sum(-1, dtype=torch.float64).tolist() for row in (q, p))
        self.scales = [drafted / own for drafted, own in zip(draft, mass, strict=True)]
        # g in the units of p: Σ g = P Σ p
        self.wanted = [own * total for own, total in zip(alive, draft, strict=True)]

    def edges(self, row: int, level: float) -> list[float]:
        """Return U_1, …, U_M and A of a row whose U_M is ``level``."""
        if self.same:
            return [level * factor for factor in self.same[row]]
        unit = self.alive[row] * self.scales[row]
        at, steps = level / unit, self.steps[row]
        upper = [unit * self.f.upper_edge(at, step) for step in steps[:-1]]
        return [*upper, unit * self.f.lower_edge(at, steps[-1])]

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
        """Return the least and the largest U_M: a ≤ 1 ≤ u_1, with room for rounding."""
        f, steps = self.f, self.steps[row]
        unit, slack = self.alive[row] * self.scales[row], SLACK[self.dtype]
        low = f.lower_edge(1.0, steps[0])
        high = f.upper_edge(1.0, steps[-1])
        if unit * high >= MOST[self.dtype]:
            top = torch.where(self.target[row] > 0, self.ratio[row], 0.0).amax()
            high = max(float(top) / unit, 1.0)
        return max(unit * low * (1 - slack), LEAST[self.dtype]), unit * high * (1 + slack)

    def at(self, row: int, level: float, ratio: float) -> float:
        """Return g_n/q_n of a token with this p_n/q_n."""
        *upper, low = self.edges(row, level)
        knots = self.worths[row].knots
        return max(low, *(min(edge, knot * ratio) for edge, knot in zip(upper, knots, strict=True)))


@torch.no_grad()
def solve_soft(bands: SoftBands, asked: Sequence[float]) -> SoftEdges:
    """Solve the rows, except those whose asked token is accepted for sure.

    ``asked`` is p_n/q_n of the drafted token, ∞ to solve the row in any case. A token is
    accepted for sure iff U_M ≥ p_n/q_n, which one evaluation at that level decides.
    """
    settled = SETTLED[bands.dtype]
    roots, whole = [], []
    for row, ratio in enumerate(asked):
        low, high = bands.bracket(row)
        start = ratio if low < ratio < high else bands.alive[row] * bands.scales[row]
        root = RisingRoot(low, high, start, settled, STEEPNESS)
        whole.append(ratio <= low)
        root.done = root.done or whole[-1]
        roots.append(root)
    first = True
    while not all(root.done for root in roots):
        values = bands.excess([root.x for root in roots])
        for row, (root, value) in enumerate(zip(roots, values, strict=True)):
            if root.done:
                continue
            if first and value <= 0 and root.x == asked[row]:
                whole[row] = root.done = True
            else:
                root.tell(value)
        first = False
    return SoftEdges(whole, [root.x for root in roots])


def steps_of(worth: Worth, price: float) -> list[float]:
    """Return (s_j − s_M)/ν for every j, and s_M/ν."""
    last = worth.slopes[-1]
    return [*((slope - last) / price for slope in worth.slopes), last / price]


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
    found = solve_soft(bands, [math.inf] * len(q))
    mass = bands.shaped(found.levels).mul(q)
    return mass / mass.sum(-1, keepdim=True)
