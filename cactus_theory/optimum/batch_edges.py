r"""The band's edges a ≤ 1 ≤ b for a batch of rows, found without a sort or on the sorted path.

The best row is h = clip(p, aq, bq) (THEORY.md, Theorems 7, 13 and 24). It sums to 1 where

.. math:: L = U + P_0, \qquad L = Σ(aq − p)_+, \quad U = Σ(p − bq)_+ \quad\text{over } q > 0

and P₀ is 1 minus the sum of p over q > 0: the draft's mass where q = 0, or above a ceiling on h/q.
At a node with alive ratio P the row p/P takes the place of p, so that P₀ may be negative.

The second equation is f′(b) − f′(a) = 1/λ at a price λ, or D(h‖q) = δ within a budget δ. Newton's
method in both edges takes one pass over the rows a step. Rows that do not converge, or would lose
precision, are solved on the sorted path: :mod:`cactus_theory.optimum.sorted_path`, the reference.
"""

import math
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.chunks import joined, parts_of
from cactus_theory.base.roots import convex_root
from cactus_theory.base.tolerances import LEAST
from cactus_theory.divergences import Divergence
from cactus_theory.optimum.certificate import Geometry, geometry_of
from cactus_theory.optimum.sorted_path import Edges, Flags, PerRow, Rows

# most steps of a search; rows that have not converged by then are solved on the sorted path
MOST_STEPS = 24
# full Newton steps before every second step is halved, as steps may jump to and fro over a ratio
UNDAMPED = 8
# Newton's start, found by trial on rows of language models: ln b in units of √(2δ/f″(1)), and the
# largest share of the way to the largest and the smallest ln(p/q)
WIDTH, SHARE = 1.5, 0.7
# error at which a search ends: L, U and D are sums of rounded terms of total size about 1
CLOSE = 1e-14
# largest step, relative to the edge, that converged rows still take: the step is known anyway
POLISH = 1e-6
# largest D(p‖q) in nats: the cost inside the band is D(p‖q) minus sums outside, else all rounding
MOST_COST = 32.0
# least budget and price: D is rounding below; the sorted path adds up from the ratio 1 outwards
LEAST_BUDGET, LEAST_PRICE = 1e-7, 0.01
# largest price, and largest f′(b) − f′(a) that is only rounding of f′(1)
MOST_PRICE, MERGED = 1e8, 1e-15
# slack of a demand for exactly the acceptance that a row can reach
ACCEPTANCE_SLACK = 1e-12


def edges(
    q: Rows,
    p: Rows,
    divergence: Divergence,
    knob: str,
    amount: float | PerRow,
    lacking: PerRow | None = None,
) -> tuple[Float[Tensor, "rows 1"], Float[Tensor, "rows 1"]]:
    """Return the edges (a, b) of the bands of float64 rows (R, V), each edge as (R, 1).

    ``knob`` is delta (the budget) or price (dA/dδ), and ``amount`` its value, one number or one for
    each row. Rows are sorted only where the search does not converge. The edges are (0, ∞) if h = p
    and (1, 1) if h = q. Tokens with q = 0 get nothing. Rows are not validated: callers check them.

    q sums to 1. p sums to 1, too, or p is a row cut to boxes
    (:func:`cactus_theory.optimum.boxes.cut_to_boxes`) and ``lacking`` is 1 minus the sum of p. If
    ``lacking`` is not 0, no band equals p, as bands sum to 1.
    """
    amounts = torch.as_tensor(amount, dtype=torch.float64, device=q.device).expand(len(q))
    with torch.no_grad():
        bands = solve_edges(geometry_of(q, p, divergence, lacking=lacking), knob, amounts)
    lower = torch.where(bands.whole, 0.0, bands.lower)
    upper = torch.where(bands.whole, torch.inf, bands.upper)
    return lower[:, None], upper[:, None]


def chosen_knob(divergence: Divergence, **knobs: Any) -> tuple[str, Any, float]:
    """Return the name, value and upper limit of the only knob that is given."""
    name = check.the_only_one(**knobs)
    if name == "price" and not divergence.priced:
        raise ValueError(
            f"price: {divergence.spec} has no one-to-one price; name "
            f"{' or '.join(f'{knob}=' for knob in knobs if knob != 'price')} instead; "
            f"got {knobs['price']!r}"
        )
    return name, knobs[name], 1.0 if name == "acceptance" else math.inf


def solve_edges(geometry: Geometry, knob: str, amount: PerRow) -> Edges:
    """Return the edges of the bands at which ``knob`` (delta, price, acceptance) is ``amount``.

    Rows on which Newton's search does not converge are sorted by p/q, and their bands looked up.
    """
    solution = searched_edges(geometry, knob, amount)
    if solution is None:
        return sorted_edges(geometry, knob, amount)
    bands, converged = solution
    unsolved = (~converged).nonzero()[:, 0]
    if len(unsolved):
        rest = sorted_edges(geometry.of_rows(unsolved), knob, amount[unsolved])
        for field in fields(Edges):
            getattr(bands, field.name)[unsolved] = getattr(rest, field.name)
    return bands


def searched_edges(geometry: Geometry, knob: str, amount: PerRow) -> tuple[Edges, Flags] | None:
    """Return the edges found without a sort, and which rows converged; None if a sort is needed."""
    f, kind = geometry.generator, geometry.divergence
    # the search divides by f″; mass that goes to tokens with q = 0 is no part of L = U + P₀
    if not (len(amount) and f.smooth) or (geometry.free and bool((geometry.zero_mass > 0).any())):
        return None
    if knob == "delta":
        amount = kind.to_generator(amount)
    elif knob != "price" or kind is not f:  # else the price depends on the divergence spent
        return None
    slices = parts_of(geometry.q)
    parts = ((at, _search(geometry.of_rows(at), knob, amount[at])) for at in slices)
    *columns, converged = joined(parts, len(amount))
    return Edges(*columns), converged


# The search moves both edges at once. Between two neighbouring ratios p/q the sums L and U are
# linear in a and b, and D is but for f, so Newton's method ends after a few passes over a row.
# 1. Start: a and b as a quadratic f would have them, between the least and the largest ratio.
# 2. A pass gives the mass of q and p below a and above b, hence L, U and the second equation's
#    excess.
# 3. A Newton step: solve the linearised equations for the rejection R; a and b then follow from
#    L = R and U + P₀ = R. If R is no number or hardly above 0, take 0.3 of the mean of L and
#    U + P₀ instead: at the start both slopes are 0.
# 4. No edge moves beyond half of the way to 1 in logarithms, so that a < 1 < b always holds. After
#    some steps every second step is halved, as steps may jump to and fro over a ratio.
# 5. A row is ready when both equations hold to CLOSE, the rounding of the sums. The solution is
#    unique: L rises in a, U falls in b, and along L = U + P₀ both D and the price are monotone.
# Rows not ready after MOST_STEPS, or whose sums lose precision, are solved on the sorted path.


class _Start(NamedTuple):
    """Numbers of each row that stay fixed in a search, and the edges from which it starts."""

    ratios: Rows  # p/q
    ends: tuple[PerRow, PerRow]  # least and largest ratio
    weights: Float[Tensor, "rows kinds vocab"]  # q, p, and within a budget q f(p/q)
    goal: PerRow  # 1/λ at a price, else the budget of f
    cost_of_p: PerRow  # Σ q f(p/q), without the terms that are ∞; 0 at a price
    lossless: Flags  # h = q
    whole: Flags  # h = p
    abandoned: Flags  # rows for the sorted path
    edges: Float[Tensor, "rows 2"]


def _start(geometry: Geometry, priced: bool, amount: PerRow) -> _Start:
    """Return the start of a search for edges at the price, or within the budget, ``amount``."""
    q, p, f = geometry.q, geometry.p, geometry.generator
    ratios, lacking = p / q, geometry.zero_mass
    if geometry.inside is not None:
        ratios[~geometry.inside] = 1.0
    least, most = ratios.aminmax(dim=-1)
    weights = q.new_empty(len(q), 2 if priced else 3, q.shape[1])
    weights[:, 0], weights[:, 1] = q, p
    if geometry.inside is not None:
        weights[:, :2].masked_fill_(~geometry.inside[:, None], 0.0)
    if priced:
        goal, cost_of_p = 1 / amount, torch.zeros_like(amount)
        lossless = torch.isinf(amount)
        whole = (goal >= f.centred_slope(most) - f.centred_slope(least)) & (lacking == 0)
        abandoned = (amount < LEAST_PRICE) | (amount > MOST_PRICE)
    else:
        cost = torch.mul(weights[:, 0], f.centred(ratios), out=weights[:, 2])
        goal, total = amount, cost.sum(-1)
        # where p = 0 and f(0) = ∞ the cost is left out: any a > 0 lifts these tokens
        cost.masked_fill_(~torch.isfinite(cost), 0.0)
        cost_of_p = cost.sum(-1)
        lossless, whole = amount == 0, (total <= amount) & (lacking == 0)
        abandoned = ~(cost_of_p <= MOST_COST) | (amount < LEAST_BUDGET) | torch.isinf(amount)
    curvature = f.curvature(torch.ones_like(goal[:1]))
    width = goal / curvature / 2 if priced else WIDTH * (2 * goal / curvature).sqrt()
    upper = torch.minimum(width.exp(), most**SHARE)
    lower = torch.maximum((-width if priced else -width / 2).exp(), least**SHARE)
    edges = torch.stack([lower.clamp(max=1.0), upper.clamp(min=1.0)], -1)
    ends, flags = (least, most), (lossless, whole, abandoned)
    return _Start(ratios, ends, weights, goal, cost_of_p, *flags, edges)


def _search(geometry: Geometry, knob: str, amount: PerRow) -> tuple[Tensor, ...]:
    """Return the fields of Edges that solve both equations of the module, and a flag for each row.

    The flag is False if the search did not converge on the row, or was abandoned.
    """
    priced, lacking = knob == "price", geometry.zero_mass
    start = _start(geometry, priced, amount)
    masks = geometry.q.new_empty(2, *geometry.q.shape)
    edges, ready = start.edges, start.lossless | start.whole
    abandoned = start.abandoned & ~ready
    for step in range(MOST_STEPS):
        if bool((ready | abandoned).all()):
            break
        torch.lt(start.ratios, edges[:, :1], out=masks[0])
        torch.gt(start.ratios, edges[:, 1:], out=masks[1])
        mass, drafted, *costs = torch.bmm(start.weights, masks.permute(1, 2, 0)).unbind(1)
        moved = edges * mass - drafted  # L and −U
        sides = torch.stack([moved[:, 0], lacking - moved[:, 1]], -1)
        rejection, close = _newton(geometry, start, edges, mass, costs, sides)
        # L rises in a, and U falls in b, by the q below and above the band
        towards = torch.stack([rejection - sides[:, 0], sides[:, 1] - rejection], -1)
        new, tiny = _kept_apart(edges, edges + towards / mass, mass, step)
        # no ratio is above b and mass is still lacking: the path may have ended
        abandoned = abandoned | ((lacking > 0) & (mass[:, 1] <= 0) & ~ready)
        # a tiny last step is taken even where both equations hold already
        edges = torch.where((~ready & (~close | tiny))[:, None], new, edges)
        ready = ready | close
    lossless, whole, (least, most) = start.lossless, start.whole & ~start.lossless, start.ends
    lower = torch.where(lossless, 1.0, torch.where(whole, least, edges[:, 0]))
    upper = torch.where(lossless, 1.0, torch.where(whole, most, edges[:, 1]))
    apart = (upper > lower) & (upper < torch.inf)  # a = b only where lossless
    # whole rows are slack, too: a copy, as single rows of each field may be overwritten
    bands = lower, upper, torch.zeros_like(lower), lossless, whole.clone(), whole
    return *bands, ready & ~abandoned & (apart | lossless | whole)


def _newton(
    geometry: Geometry, start: _Start, edges: Tensor, mass: Tensor, costs: list[Tensor],
    sides: Tensor,
) -> tuple[PerRow, Flags]:  # fmt: skip
    """Return the rejection R that a Newton step aims at, and whether both equations hold already.

    ``sides`` are L and U + P₀, ``mass`` is the q below a and above b. ``costs``, given within a
    budget, are Σ q f(p/q) of these tokens. As R rises by 1, a rises and b falls by 1/``mass``. So
    f′(b) − f′(a) falls by the sum of f″/``mass`` at both edges, and D by f′(b) − f′(a).
    """
    f, goal = geometry.generator, start.goal
    lifted, cut = sides.unbind(-1)
    slopes = f.centred_slope(edges)
    if not costs:  # at a price
        excess = slopes[:, 1] - slopes[:, 0] - goal
        falls = f.curvature(edges) / mass
        rejection = (excess + falls[:, 0] * lifted + falls[:, 1] * cut) / falls.sum(-1)
    else:
        excess = start.cost_of_p - goal + (mass * f.centred(edges) - costs[0]).sum(-1)
        rejection = excess - slopes[:, 0] * lifted + slopes[:, 1] * cut
        rejection = rejection / (slopes[:, 1] - slopes[:, 0])
    close = excess.abs() + (lifted - cut).abs() <= CLOSE * (1 + goal)
    mean = (lifted + cut) / 2  # for rows where R is no number or hardly above 0
    usable = torch.isfinite(rejection) & (rejection > 0.05 * mean)
    return torch.where(usable, rejection, 0.3 * mean), close


def _kept_apart(edges: Tensor, new: Tensor, mass: Tensor, step: int) -> tuple[Tensor, Flags]:
    """Return edges ``new``, damped and kept on their sides of 1, and which rows hardly moved."""
    half_way, above = edges.sqrt(), edges > 1  # half of the way to 1, in logarithms
    new = torch.where(above, torch.maximum(new, half_way), torch.minimum(new, half_way))
    tiny = ((new - edges).abs() <= POLISH * edges).all(-1)
    if step >= UNDAMPED and step % 2 == 0:
        new = torch.where(tiny[:, None], new, (new + edges) / 2)
    usable = (new > 0) & (new < torch.inf) & (mass > 0)
    # no token is below a: halve a; none is above b: leave b
    return torch.where(usable, new, edges * edges.new_tensor([0.5, 1.0])), tiny


def sorted_edges(geometry: Geometry, knob: str, amount: PerRow) -> Edges:
    """Return the edges of the bands of rows, found by a sort by p/q and lookups.

    ``knob`` is price, delta or acceptance, and ``amount`` its value in each row.
    """
    path = geometry.path
    rejection = _locate(geometry, knob, amount)
    lossless = rejection >= path.largest
    slack = (rejection <= path.smallest) & ~lossless
    lower, upper, _ = path.at(rejection)
    f, kind = geometry.generator, geometry.divergence
    if knob == "price" and kind is f:  # one ulp of ε moves the edges of tiny tokens any distance
        slope = torch.full_like(amount, f.slope_at_one)
        # f′(b) − f′(a) = 1/λ with a ≤ 1 ≤ b bounds either edge by the other edge at 1
        lower = torch.maximum(lower, f.ratio_at(slope - 1 / amount))
        upper = torch.minimum(upper, f.ratio_at(slope + 1 / amount))
    if kind.generator is not None:  # edges merged by rounding: take h = q, a few ulps of ε away
        lossless = lossless | ((geometry.slope(lower, upper) <= MERGED) & ~slack)
    elif knob == "delta":  # a bound on h/q has no generator: b is the budget's, ε gives it roughly
        upper = torch.where(slack, upper, kind.ceiling(amount))
    leaked = torch.zeros_like(rejection)
    if geometry.free:
        leaked = torch.where(upper < math.inf, 0.0, path.zero_mass - rejection).clamp(min=0.0)
    lower = torch.where(lossless, 1.0, lower)
    upper = torch.where(lossless, 1.0, upper)
    # h is p at ε = 0; a row cut to boxes may end there, too, with P₀ < 0, but is no distribution
    whole = slack & (rejection <= 0) & (path.zero_mass >= 0)
    return Edges(lower, upper, leaked, lossless, slack, whole)


def _locate(geometry: Geometry, knob: str, amount: PerRow) -> PerRow:
    """Return the rejection probability ε of each row's band, the least ε if no limit binds."""
    path = geometry.path

    def share_at(rejection: PerRow) -> tuple[PerRow, PerRow]:
        """Return the price dA/dδ at ε divided by ``amount``, and no derivative (NaN)."""
        lower, upper, cost = path.at(rejection)
        price, spent = 1 / geometry.slope(lower, upper), geometry.spent(upper, cost)
        share = geometry.divergence.price_from_generator(price, spent) / amount
        return share, torch.full_like(share, torch.nan)

    if knob == "delta":
        _, upper, cost = path.at(path.smallest)
        slack, lossless = geometry.spent(upper, cost) <= amount, amount == 0
        rejection = geometry.rejection(torch.where(slack | lossless, 0.0, amount))
    elif knob == "price":
        slack, lossless = ~(share_at(path.smallest)[0] < 1), amount == math.inf
        # the price rises with ε
        one = torch.ones_like(amount)
        rejection = convex_root(share_at, over=path.largest, under=path.smallest, budget=one)
        slack = slack | (rejection < LEAST)
    else:
        reachable = geometry.reachable
        if bool((amount > reachable + ACCEPTANCE_SLACK).any()):
            row = int((amount - reachable).argmax())
            raise ValueError(
                f"acceptance: must not exceed {reachable[row].item():.12g}, the draft's mass where "
                f"the target has any; got {amount[row].item():g}"
            )
        slack, lossless = amount >= reachable, 1 - amount >= path.largest
        rejection = torch.minimum(torch.maximum(1 - amount, path.smallest), path.largest)
    rejection = torch.where(slack, path.smallest, rejection)
    return torch.where(lossless, path.largest, rejection)
