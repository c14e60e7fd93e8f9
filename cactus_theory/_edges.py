r"""The band's edges without a sort, for decoding: Newton on (a, b) with O(V) sums.

At edges (a, b) let L = Σ(aq − p)₊, U = Σ(p − bq)₊. Between two ratios p/q everything is
linear in the edges except f, so one Newton step solves both L = U = ε and D = δ for the
linearised ε. Rows that have not converged after ``MOST_STEPS`` are left to the sorted path.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.divergences import FDivergence

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]

MOST_STEPS = 24
UNDAMPED = 8
# where Newton starts, found by trial on rows of language models: ln b in units of √(2δ/f″(1)),
# and how far towards the largest and the smallest ln(p/q) an edge may lie
STARTING_WIDTH, STARTING_SHARE = 1.5, 0.7
# L, U and D are sums of rounded terms of total size about 1
CLOSE = 1e-14
# the cost inside the band is what is left of D(p‖q): above this it has lost that precision
MOST_COST = 32.0


@dataclass(frozen=True)
class Edges:
    """Per row: a, b, and whether they are converged."""

    lower: PerRow
    upper: PerRow
    done: Bool[Tensor, "rows"]


@dataclass(frozen=True)
class Sums:
    """Masses of q and p and costs Σ q f(p/q) below a and above b, per row."""

    q_low: PerRow
    q_high: PerRow
    lifted: PerRow
    cut: PerRow
    cost_low: PerRow
    cost_high: PerRow


class Tables:
    """Ratios and weights of float64 rows (R, V), ready for masked sums."""

    def __init__(self, q: Rows, p: Rows, f: FDivergence) -> None:
        ratio = p / q
        inside = torch.isfinite(ratio)
        whole = bool(inside.all())
        self.ratio = ratio if whole else torch.where(inside, ratio, 1.0)
        q_in = q if whole else torch.where(inside, q, 0.0)
        p_in = p if whole else torch.where(inside, p, 0.0)
        self.leaked = torch.zeros_like(q[:, 0]) if whole else torch.where(inside, 0.0, p).sum(-1)
        cost = q_in * f.centred(self.ratio)
        self.total = cost.sum(-1)
        self.weights = torch.stack([q_in, p_in, cost], 1)

    def sums(self, lower: PerRow, upper: PerRow) -> Sums:
        """Return the masked sums at the edges."""
        below, above = self.ratio < lower[:, None], self.ratio > upper[:, None]
        q_low, p_low, cost_low = (self.weights * below[:, None]).sum(-1).unbind(-1)
        q_high, p_high, cost_high = (self.weights * above[:, None]).sum(-1).unbind(-1)
        cut = p_high - upper * q_high + self.leaked
        return Sums(q_low, q_high, lower * q_low - p_low, cut, cost_low, cost_high)


def edges_for_budget(q: Rows, p: Rows, f: FDivergence, delta: PerRow) -> Edges:
    """Return the edges whose band spends ``delta``; (0, ∞), so h = p, where p is within it."""
    tables = Tables(q, p, f)
    lower, upper = _near(tables, f, delta)
    whole = (tables.total <= delta) & (tables.leaked == 0)
    ready = whole | (delta == 0)
    given_up = (tables.leaked > 0) | ~(tables.total <= MOST_COST)
    for step in range(MOST_STEPS):
        s = tables.sums(lower, upper)
        spent = tables.total - s.cost_low - s.cost_high
        spent = spent + s.q_low * f.centred(lower) + s.q_high * f.centred(upper)
        ready = ready | ((spent - delta).abs() + (s.lifted - s.cut).abs() <= CLOSE * (1 + delta))
        if bool((ready | given_up).all()):
            break
        down, up = f.slope(lower) - f.slope_at_one, f.slope(upper) - f.slope_at_one
        wanted = (spent - delta - down * s.lifted + up * s.cut) / (up - down)
        mean = (s.lifted + s.cut) / 2
        # at the start both slopes are 0 and the step is undefined: halve instead
        wanted = torch.where(torch.isfinite(wanted) & (wanted > 0.05 * mean), wanted, 0.3 * mean)
        a = (lower + (wanted - s.lifted) / s.q_low).clamp(max=1.0)
        b = (upper - (wanted - s.cut) / s.q_high).clamp(min=1.0)
        if step >= UNDAMPED and step % 2 == 0:  # a step may hop to and fro over a ratio
            a, b = (a + lower) / 2, (b + upper) / 2
        move = ~ready
        lower = torch.where(move & (a > 0) & (s.q_low > 0), a, torch.where(move, lower / 2, lower))
        upper = torch.where(move & (b < torch.inf) & (s.q_high > 0), b, upper)
    strict = delta == 0
    lower = torch.where(strict, 1.0, torch.where(whole, 0.0, lower))
    upper = torch.where(strict, 1.0, torch.where(whole, torch.inf, upper))
    return Edges(lower, upper, ready & ~given_up)


def _near(tables: Tables, f: FDivergence, delta: PerRow) -> tuple[PerRow, PerRow]:
    """Return edges to start from: those of a curvature f″(1), with a ratio beyond each."""
    step = 1e-3
    curvature = (f.slope(torch.ones_like(delta[:1]) * (1 + step)) - f.slope_at_one) / step
    width = STARTING_WIDTH * (2 * delta / curvature).sqrt()
    upper = torch.minimum(width.exp(), tables.ratio.amax(-1) ** STARTING_SHARE)
    lower = torch.maximum((-width / 2).exp(), tables.ratio.amin(-1) ** STARTING_SHARE)
    return lower.clamp(max=1.0), upper.clamp(min=1.0)


def edges_for_kl_price(q: Rows, p: Rows, price: float) -> Edges:
    """Return the KL band's edges with b/a = e^{1/price}: one normalisation to solve.

    Σ(h − p) = 0 in a alone, h = clip(p, aq, bq). Its slope is Σ_{h≠p} h / a, so every step
    is a few passes over the rows; ``price`` must leave e^{1/price} finite.
    """
    widen = math.exp(1 / price)
    least = torch.full_like(q[:, 0], 1 / widen)
    most = torch.ones_like(least)
    lower = torch.sqrt(least)
    ready = torch.zeros_like(lower, dtype=torch.bool)
    for step in range(2 * MOST_STEPS):
        floor = q * lower[:, None]
        h = torch.clamp(p, floor, floor * widen)
        moved = h - p
        error = moved.sum(-1)
        ready = error.abs() <= CLOSE
        if bool(ready.all()):
            break
        most, least = torch.where(error > 0, lower, most), torch.where(error < 0, lower, least)
        newton = lower - lower * error / torch.where(moved == 0, 0.0, h).sum(-1)
        middle = (least + most) / 2
        if step % 5 == 4:
            newton = middle
        usable = (newton > least) & (newton < most)
        lower = torch.where(ready, lower, torch.where(usable, newton, middle))
    return Edges(lower, lower * widen, ready)
