r"""The band's edges without a sort: Newton on masked sums, a few passes over the rows a step.

At edges (a, b) let L = Σ(aq − p)₊, U = Σ(p − bq)₊, both over q > 0, and P₀ = Σ_{q=0} p. A row
is a band when L = U + P₀. Between two ratios p/q everything is linear in the edges except f.

By budget, one step solves L = U + P₀ = ε and D = δ for the linearised ε. By price,
f′(b) − f′(a) = 1/λ gives a as a function of b, and one equation in b is left. Rows that do not
converge, or would lose precision, are left to the sorted path: ``done`` is False for them.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences.definition import SAFE_RATIO
from cactus_theory.optimum.geometry import Edges, Flags, PerRow, Rows

Pairs = Float[Tensor, "rows 2"]

# rows that have not converged after so many steps go to the sorted path
MOST_STEPS = 24
# full steps before every second one is damped, should a row jump to and fro over a ratio
UNDAMPED = 8
# where Newton starts, found by trial on rows of language models: ln b in units of √(2δ/f″(1)),
# and how far towards the largest and the smallest ln(p/q) an edge may lie
STARTING_WIDTH, STARTING_SHARE = 1.5, 0.7
# L, U and D are sums of rounded terms of total size about 1
CLOSE = 1e-14
# converged rows still take a step this small (relative to the edge): it costs nothing
POLISH = 1e-6
# by price, a step this small is taken in b itself: f′(b) has lost digits where f′(∞) is near
NEAR = 1e-3
# the cost inside the band is D(p‖q) minus sums outside it: above this D(p‖q), mostly rounding
MOST_COST = 32.0
# below these D and the price are rounding error; the sorted path adds up from the ratio 1 outwards
LEAST_BUDGET, LEAST_PRICE = 1e-7, 0.01
# entries worked on at once: half a dozen such arrays stay in the cache
AT_ONCE = 1 << 18


class Tables:
    """Ratios and weights of float64 rows (R, V) in reused memory, ready for masked sums."""

    def __init__(self, q: Rows, p: Rows, f: FDivergence, costs: bool) -> None:
        shape, device = q.shape, q.device
        ratio = torch.div(p, q, out=scratch("newton.ratio", shape, device=device))
        weights = scratch("newton.weights", (shape[0], 2 + costs, shape[1]), device=device)
        self.generator, self.ratio, self.weights = f, ratio, weights
        weights[:, 0], weights[:, 1] = q, p
        self.leaked = torch.zeros_like(q[:, 0])
        if not bool(ratio.amax() < torch.inf):  # NaN, for 0/0, is caught as well
            self._set_zeros_apart(p)
        self.least, self.most = ratio.amin(-1), ratio.amax(-1)
        if costs:
            self._add_costs()

    def _add_costs(self) -> None:
        shape, weights = self.ratio.shape, self.weights
        memory = scratch("newton.masks", (2, *shape), device=self.ratio.device)[0]
        cost = self.generator.centred(self.ratio, out=memory)
        cost = torch.mul(weights[:, 0], cost, out=weights[:, 2])
        self.total = self.finite = cost.sum(-1)
        if not bool((self.total < torch.inf).all()):
            # f(0) = ∞ at tokens that the draft excludes: they are lifted at any a > 0
            cost[~torch.isfinite(cost)] = 0.0
            self.finite = cost.sum(-1)

    def _set_zeros_apart(self, p: Rows) -> None:
        outside = ~torch.isfinite(self.ratio)
        self.leaked = torch.where(outside, p, 0.0).sum(-1)
        self.ratio[outside] = 1.0
        self.weights[:, :2].masked_fill_(outside[:, None], 0.0)

    def sums(self, edges: Pairs) -> tuple[Pairs, ...]:
        """Return Σ q, Σ p and Σ q f(p/q) of what lies below a and of what lies above b."""
        rows, _, vocab = self.weights.shape
        masks = scratch("newton.masks", (rows, 2, vocab), device=self.ratio.device)
        torch.lt(self.ratio, edges[:, :1], out=masks[:, 0])
        torch.gt(self.ratio, edges[:, 1:], out=masks[:, 1])
        return torch.bmm(self.weights, masks.transpose(1, 2)).unbind(1)


def newton_edges(
    q: Rows, p: Rows, f: FDivergence, knob: str, amount: PerRow
) -> tuple[Edges, Flags]:
    """Return the edges that spend a ``delta`` of f, or at which one more unit buys a ``price``.

    Of float64 rows (R, V); ``knob`` is one of the two, ``amount`` what each row has of it. Also
    which rows have converged.
    """
    budget = knob == "delta"
    solve = _for_budget if budget else _for_price
    parts = [solve(Tables(q[at], p[at], f, costs=budget), amount[at]) for at in parts_of(q)]
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(vars(edges).values() for edges, _ in parts), strict=True)
    return Edges(*map(torch.cat, columns)), torch.cat([done for _, done in parts])


def parts_of(q: Rows) -> Iterator[slice]:
    """Yield slices of rows that are worked on together."""
    rows, vocab = q.shape
    step = max(1, AT_ONCE // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _for_budget(tables: Tables, delta: PerRow) -> tuple[Edges, Flags]:
    f = tables.generator
    lossless, whole = delta == 0, (tables.total <= delta) & (tables.leaked == 0)
    ready = lossless | whole
    abandoned = ~(tables.finite <= MOST_COST) | (delta < LEAST_BUDGET) | torch.isinf(delta)
    abandoned = abandoned & ~ready
    edges = _starting_edges(tables, delta)
    for step in range(MOST_STEPS):
        if bool((ready | abandoned).all()):
            break
        mass, drafted, cost = tables.sums(edges)
        moved = edges * mass - drafted  # L and −U
        excess = tables.finite - delta + (mass * f.centred(edges) - cost).sum(-1)
        close = excess.abs() + (moved.sum(-1) - tables.leaked).abs() <= CLOSE * (1 + delta)
        new = _budget_step(f, mass, moved, tables.leaked, edges, excess)
        tiny = ((new - edges).abs() <= POLISH * edges).all(-1)
        if step >= UNDAMPED and step % 2 == 0:  # steps may jump to and fro over a ratio
            new = torch.where(tiny[:, None], new, (new + edges) / 2)
        usable = (new > 0) & (new < torch.inf) & (mass > 0)
        # no token below a: halve it. None above b: leave it
        new = torch.where(usable, new, edges * edges.new_tensor([0.5, 1.0]))
        # beyond the largest ratio with mass left over, the path may have ended
        abandoned = abandoned | ((tables.leaked > 0) & (mass[:, 1] <= 0) & ~ready)
        edges = torch.where((~ready & (~close | tiny))[:, None], new, edges)
        ready = ready | close
    return _with_ends(tables, edges, lossless, whole, ready & ~abandoned)


def _with_ends(
    tables: Tables, edges: Pairs, lossless: Flags, whole: Flags, done: Flags
) -> tuple[Edges, Flags]:
    """Return the edges with those of the path's ends filled in; a = b only where lossless."""
    whole = whole & ~lossless
    lower = torch.where(lossless, 1.0, torch.where(whole, tables.least, edges[:, 0]))
    upper = torch.where(lossless, 1.0, torch.where(whole, tables.most, edges[:, 1]))
    apart = (upper > lower) & (upper < torch.inf)
    bands = Edges(lower, upper, torch.zeros_like(lower), lossless, whole.clone(), whole)
    return bands, done & (apart | lossless | whole)


def _budget_step(
    f: FDivergence, mass: Pairs, moved: Pairs, leaked: PerRow, edges: Pairs, excess: PerRow
) -> Pairs:
    """Return the edges at which the linearised L, U + P₀ and D agree."""
    down, up = f.centred_slope(edges).unbind(-1)
    lifted, cut = moved[:, 0], leaked - moved[:, 1]
    rejection = (excess - down * lifted + up * cut) / (up - down)
    mean = (lifted + cut) / 2
    # at the start both slopes are 0 and the step is undefined: halve instead
    rejection = torch.where(
        torch.isfinite(rejection) & (rejection > 0.05 * mean), rejection, 0.3 * mean
    )
    step = torch.stack([rejection - lifted, cut - rejection], -1) / mass
    return torch.stack(
        [(edges + step)[:, 0].clamp(max=1.0), (edges + step)[:, 1].clamp(min=1.0)], -1
    )


def _starting_edges(tables: Tables, delta: PerRow) -> Pairs:
    """Return edges to start from: those of a curvature f″(1), with a ratio beyond each."""
    curvature = tables.generator.curvature(torch.ones_like(delta[:1]))
    width = STARTING_WIDTH * (2 * delta / curvature).sqrt()
    upper = torch.minimum(width.exp(), tables.most**STARTING_SHARE)
    lower = torch.maximum((-width / 2).exp(), tables.least**STARTING_SHARE)
    return torch.stack([lower.clamp(max=1.0), upper.clamp(min=1.0)], -1)


def _for_price(tables: Tables, price: PerRow) -> tuple[Edges, Flags]:
    f, width = tables.generator, 1 / price
    end = f.centred_slope(tables.most) - f.centred_slope(tables.least)
    lossless, whole = torch.isinf(price), (price <= 1 / end) & (tables.leaked == 0)
    ready = lossless | whole
    abandoned = (price < LEAST_PRICE) & ~ready
    least = torch.ones_like(price)
    most = torch.minimum(f.ratio_at(f.slope_at_one + width), tables.most).clamp(min=1.0)
    middle = f.ratio_at(f.slope_at_one + width / 2)
    upper = torch.minimum(middle, tables.most**STARTING_SHARE).clamp(min=1.0)
    edges = _with_partner(f, upper, width)
    for step in range(2 * MOST_STEPS):
        upper = edges[:, 1]
        # beyond the largest ratio with mass left over, the path may have ended
        abandoned = abandoned | ((tables.leaked > 0) & (upper >= tables.most) & ~ready)
        if bool((ready | abandoned).all()):
            break
        mass, drafted = tables.sums(edges)
        error = (edges * mass - drafted).sum(-1) - tables.leaked
        new, size = _price_step(f, mass, edges, error)
        above, close = error > 0, error.abs() <= CLOSE
        most, least = torch.where(above, upper, most), torch.where(above, least, upper)
        usable = (new > least) & (new < most)
        tiny = usable & (size <= POLISH)
        if step % 5 == 4:  # halve the bracket now and then, in case Newton converges slowly
            usable = usable & close
        new = torch.where(usable, new, (least * most).sqrt())
        new = torch.where(ready | (close & ~tiny), upper, new)
        edges, ready = _with_partner(f, new, width), ready | close
    return _with_ends(tables, edges, lossless, whole, ready & ~abandoned)


def _with_partner(f: FDivergence, upper: PerRow, width: PerRow) -> Pairs:
    """Return (a, b) with f′(a) = f′(b) − 1/λ; a is 0 where f′ does not fall so low.

    It is from b, and not b from a: where f′(∞) is finite, b depends on the last digits of a.
    """
    return torch.stack([f.ratio_at(f.slope(upper) - width).clamp(max=1.0), upper], -1)


def _price_step(f: FDivergence, mass: Pairs, edges: Pairs, error: PerRow) -> tuple[PerRow, PerRow]:
    """Return b after a Newton step, in f′(b), in which large steps go far; a small one in b.

    Also the step's size relative to b.
    """
    upper, curvature = edges[:, 1], f.curvature(edges.clamp(min=SAFE_RATIO))
    back = error / (mass / curvature).nansum(-1)  # no mass below a = 0, where f″ may be 0
    step = back / curvature[:, 1]
    size = step.abs() / upper
    return torch.where(size <= NEAR, upper - step, f.ratio_at(f.slope(upper) - back)), size
