r"""The band's edges without a sort: Newton on masked sums, a few passes over the rows a step.

At edges (a, b) let L = Σ(aq − p)₊, U = Σ(p − bq)₊, both over q > 0, and P₀ = Σ_{q=0} p. A row
is a band when L = U + P₀. Between two ratios p/q everything is linear in the edges except f.

By budget, one step solves L = U + P₀ = ε and D = δ for the linearised ε. By price,
f′(b) − f′(a) = 1/λ gives b as a function of a, and one equation in a is left. What does not
settle, or would lose precision, is left to the sorted path: ``done`` says which rows those are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.divergences import SAFE_RATIO, FDivergence

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]

MOST_STEPS = 24
UNDAMPED = 8
# where Newton starts, found by trial on rows of language models: ln b in units of √(2δ/f″(1)),
# and how far towards the largest and the smallest ln(p/q) an edge may lie
STARTING_WIDTH, STARTING_SHARE = 1.5, 0.7
# L, U and D are sums of rounded terms of total size about 1
CLOSE = 1e-14
# a step this small, relative to the edge, is taken from a settled row: it costs nothing
POLISH = 1e-6
# the cost inside the band is what is left of D(p‖q): above this it has lost that precision
MOST_COST = 32.0
# below, D and the price are all rounding; the sorted path adds up from the ratio 1 outwards
LEAST_BUDGET, LEAST_PRICE = 1e-7, 0.01
# an edge beyond any finite ratio, times q = 0 still 0
NO_EDGE = 1e300
# entries worked on at once: half a dozen such arrays stay in the cache
AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Found:
    """Per row: the edges a ≤ 1 ≤ b; whether h = q, h = p, the path ended, and it is settled."""

    lower: PerRow
    upper: PerRow
    lossless: Bool[Tensor, "rows"]
    whole: Bool[Tensor, "rows"]
    slack: Bool[Tensor, "rows"]
    done: Bool[Tensor, "rows"]


@dataclass(frozen=True)
class Sums:
    """Masses of q and p and costs Σ q f(p/q) below a and above b, per row."""

    q_low: PerRow
    q_high: PerRow
    lifted: PerRow
    cut: PerRow
    cost: PerRow


class Tables:
    """Ratios and weights of float64 rows (R, V) in reused memory, ready for masked sums."""

    def __init__(self, q: Rows, p: Rows, f: FDivergence) -> None:
        shape, device = q.shape, q.device
        ratio = torch.div(p, q, out=scratch("newton.ratio", shape, device=device))
        weights = scratch("newton.weights", (shape[0], 3, shape[1]), device=device)
        self.generator, self.ratio, self.weights = f, ratio, weights
        weights[:, 0], weights[:, 1] = q, p
        self.leaked = torch.zeros_like(q[:, 0])
        if not bool(ratio.amax() < torch.inf):  # NaN, for 0/0, is caught as well
            self._set_zeros_apart(p)
        self.least, self.most = ratio.amin(-1), ratio.amax(-1)
        cost = torch.mul(weights[:, 0], f.centred(ratio), out=weights[:, 2])
        self.total = cost.sum(-1)
        self.finite = self.total
        if not bool((self.total < torch.inf).all()):
            # f(0) = ∞ at tokens that the draft excludes: they are lifted at any a > 0
            cost[~torch.isfinite(cost)] = 0.0
            self.finite = cost.sum(-1)

    def _set_zeros_apart(self, p: Rows) -> None:
        outside = ~torch.isfinite(self.ratio)
        self.leaked = torch.where(outside, p, 0.0).sum(-1)
        self.ratio[outside] = 1.0
        self.weights[:, :2].masked_fill_(outside[:, None], 0.0)

    def sums(self, lower: PerRow, upper: PerRow) -> Sums:
        """Return the masked sums at the edges."""
        rows, _, vocab = self.weights.shape
        masks = scratch("newton.masks", (rows, 2, vocab), device=self.ratio.device)
        torch.lt(self.ratio, lower[:, None], out=masks[:, 0])
        torch.gt(self.ratio, upper[:, None], out=masks[:, 1])
        found = torch.bmm(self.weights, masks.transpose(1, 2))
        (q_low, q_high), (p_low, p_high), (low, high) = (s.unbind(-1) for s in found.unbind(1))
        cut = p_high - upper * q_high + self.leaked
        return Sums(q_low, q_high, lower * q_low - p_low, cut, self.finite - low - high)


def newton_for_budget(q: Rows, p: Rows, f: FDivergence, delta: PerRow) -> Found:
    """Return the bands that spend ``delta`` of ``f``, float64 rows (R, V)."""
    return _by_parts(q, lambda at: _for_budget(Tables(q[at], p[at], f), delta[at]))


def newton_for_price(q: Rows, p: Rows, f: FDivergence, price: PerRow) -> Found:
    """Return the bands at which one more unit of ``f`` buys ``price``, float64 rows (R, V)."""
    return _by_parts(q, lambda at: _for_price(Tables(q[at], p[at], f), price[at]))


def _by_parts(q: Rows, find: Callable[[slice], Found]) -> Found:
    parts = [find(at) for at in parts_of(q)]
    if len(parts) == 1:
        return parts[0]
    return Found(*(torch.cat([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = tuple(Found.__dataclass_fields__)


def parts_of(q: Rows) -> Iterator[slice]:
    """Yield slices of rows that are worked on together."""
    rows, vocab = q.shape
    step = max(1, AT_ONCE // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _for_budget(tables: Tables, delta: PerRow) -> Found:
    f = tables.generator
    lossless, whole = delta == 0, (tables.total <= delta) & (tables.leaked == 0)
    ready = lossless | whole
    hopeless = ~(tables.finite <= MOST_COST) | (delta < LEAST_BUDGET) | torch.isinf(delta)
    hopeless = hopeless & ~ready
    lower, upper = _near(tables, delta)
    for step in range(MOST_STEPS):
        if bool((ready | hopeless).all()):
            break
        s = tables.sums(lower, upper)
        spent = s.cost + s.q_low * f.centred(lower) + s.q_high * f.centred(upper)
        close = (spent - delta).abs() + (s.lifted - s.cut).abs() <= CLOSE * (1 + delta)
        a, b = _budget_step(f, s, lower, upper, spent - delta)
        tiny = ((a - lower).abs() <= POLISH * lower) & ((b - upper).abs() <= POLISH * upper)
        if step >= UNDAMPED and step % 2 == 0:  # a step may hop to and fro over a ratio
            a, b = torch.where(tiny, a, (a + lower) / 2), torch.where(tiny, b, (b + upper) / 2)
        move = ~ready & (~close | tiny)
        # beyond the largest ratio with mass left over, the path may have ended
        hopeless = hopeless | (tables.leaked > 0) & (s.q_high <= 0) & ~ready
        ready = ready | close
        lower = torch.where(move & (a > 0) & (s.q_low > 0), a, torch.where(move, lower / 2, lower))
        upper = torch.where(move & (b < torch.inf) & (s.q_high > 0), b, upper)
    return _found(tables, lower, upper, lossless, whole, whole, ready & ~hopeless)


def _found(
    tables: Tables,
    lower: PerRow,
    upper: PerRow,
    lossless: Bool[Tensor, "rows"],
    whole: Bool[Tensor, "rows"],
    slack: Bool[Tensor, "rows"],
    done: Bool[Tensor, "rows"],
) -> Found:
    """Return the edges with those of the path's ends filled in; a = b only where lossless."""
    whole, slack = whole & ~lossless, slack & ~lossless
    lower = torch.where(lossless, 1.0, torch.where(whole, tables.least, lower))
    upper = torch.where(lossless, 1.0, torch.where(slack, tables.most, upper))
    apart = (upper > lower) & (upper < NO_EDGE)
    return Found(lower, upper, lossless, whole, slack, done & (apart | lossless | whole))


def _budget_step(
    f: FDivergence, s: Sums, lower: PerRow, upper: PerRow, over: PerRow
) -> tuple[PerRow, PerRow]:
    """Return the edges at which the linearised L, U and D agree."""
    down, up = f.centred_slope(lower), f.centred_slope(upper)
    wanted = (over - down * s.lifted + up * s.cut) / (up - down)
    mean = (s.lifted + s.cut) / 2
    # at the start both slopes are 0 and the step is undefined: halve instead
    wanted = torch.where(torch.isfinite(wanted) & (wanted > 0.05 * mean), wanted, 0.3 * mean)
    a = (lower + (wanted - s.lifted) / s.q_low).clamp(max=1.0)
    b = (upper - (wanted - s.cut) / s.q_high).clamp(min=1.0)
    return a, b


def _near(tables: Tables, delta: PerRow) -> tuple[PerRow, PerRow]:
    """Return edges to start from: those of a curvature f″(1), with a ratio beyond each."""
    curvature = tables.generator.curvature(torch.ones_like(delta[:1]))
    width = STARTING_WIDTH * (2 * delta / curvature).sqrt()
    upper = torch.minimum(width.exp(), tables.most**STARTING_SHARE)
    lower = torch.maximum((-width / 2).exp(), tables.least**STARTING_SHARE)
    return lower.clamp(max=1.0), upper.clamp(min=1.0)


def _for_price(tables: Tables, price: PerRow) -> Found:
    f, width = tables.generator, 1 / price
    end = f.centred_slope(tables.most) - f.centred_slope(tables.least)
    lossless, whole = torch.isinf(price), (price <= 1 / end) & (tables.leaked == 0)
    ready = lossless | whole
    hopeless = (price < LEAST_PRICE) & ~ready
    least = f.ratio_at(f.slope_at_one - width)
    most = torch.ones_like(least)
    middle = f.ratio_at(f.slope_at_one - width / 2)
    lower = torch.where(middle > least, middle, (least + most) / 2)
    upper, q_high = most, torch.zeros_like(most)
    for step in range(2 * MOST_STEPS):
        upper = _partner(f, lower, width)
        if bool((ready | hopeless).all()):
            break
        s = tables.sums(lower, upper)
        error = s.lifted - s.cut
        steepness = s.q_low + s.q_high * _partner_slope(f, lower, upper)
        newton = lower - error / steepness
        close = error.abs() <= CLOSE
        tiny = (newton - lower).abs() <= POLISH * lower
        most, least = torch.where(error > 0, lower, most), torch.where(error < 0, lower, least)
        usable = (newton > least) & (newton < most) & (step % 5 != 4)
        moved = torch.where(usable, newton, (least + most) / 2)
        q_high = torch.where(ready, q_high, s.q_high)
        lower = torch.where(ready | (close & ~(tiny & usable)), lower, moved)
        ready = ready | close
    slack = whole | ((tables.leaked > 0) & (q_high <= 0))
    return _found(tables, lower, upper, lossless, whole, slack, ready & ~hopeless)


def _partner(f: FDivergence, lower: PerRow, width: PerRow) -> PerRow:
    """Return b with f′(b) = f′(a) + 1/λ."""
    return f.ratio_at(f.slope(lower) + width).clamp(min=1.0, max=NO_EDGE)


def _partner_slope(f: FDivergence, lower: PerRow, upper: PerRow) -> PerRow:
    """Return db/da = f″(a)/f″(b), 0 where there is no upper edge."""
    slope = f.curvature(lower.clamp(min=SAFE_RATIO)) / f.curvature(upper)
    return torch.where((upper < NO_EDGE) & torch.isfinite(slope), slope, 0.0)
