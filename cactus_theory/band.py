r"""The best acceptance under an honest budget: a band around the target.

.. math:: \max_h \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

For every divergence here :math:`h = \mathrm{clip}(p, aq, bq)` with 0 ≤ a ≤ 1 ≤ b is optimal;
the divergence only decides how far along the path. Prior art for reverse KL: mentored
decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv 2609.30474).

The Lagrange dual gives a bound without any solver, the certificate
:math:`A \le λδ + μ + Σ_i q_i[\min(ρ_i, u_i) − λ f(u_i) − μ u_i]` with ρ = p/q,
u = clip(ρ, a, b), λ = 1/(f′(b) − f′(a)), μ = −λ f′(a).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory._path import Path, Point, reject_for_budget, reject_for_price
from cactus_theory.divergences import (
    Divergence,
    FDivergence,
    MaxDivergence,
    Renyi,
    TotalVariation,
)
from cactus_theory.divergences import (
    divergence as find_divergence,
)

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]
SUPPORTS = ("target", "free")
# slack when asking for exactly the acceptance that a row can reach
ACCEPTANCE_SLACK = 1e-12
# ln b is looked for up to here, in so many halvings
LARGEST_LOG, STEEP_STEPS = 700.0, 64


@dataclass(frozen=True)
class OptimalAcceptance:
    """The optimum for each row; rows in the input's kind and dtype, scalars in float64.

    Attributes
    ----------
    target : (..., V), the row h to verify against instead of q.
    acceptance : (...), Σ min(p, h), the probability of keeping the drafted token.
    divergence : (...), D(h‖q) spent, in the divergence's unit (nats for KL).
    lower, upper : (...), the band's edges a and b; min and max of p/q where h = p.
    price : (...), dA/dδ at the optimum: acceptance bought by one more unit of divergence.
    gap : (...), certified bound minus acceptance; zero up to rounding, of either sign.
    """

    target: Any
    acceptance: Any
    divergence: Any
    lower: Any
    upper: Any
    price: Any
    gap: Any


@dataclass(frozen=True)
class Frontier:
    """Points (..., points) of the optimal trade-off, from h = q to the end of the path."""

    delta: Any
    acceptance: Any
    price: Any


class Geometry:
    """A divergence on the path of bands of some rows: budgets, prices and certificates."""

    def __init__(self, q: Rows, p: Rows, divergence: Divergence, support: str) -> None:
        self.q, self.p, self.divergence = q, p, divergence
        generator = divergence.generator if isinstance(divergence, Renyi) else divergence
        if not isinstance(generator, FDivergence):
            generator = TotalVariation()  # the path is the same; only the meter differs
        free = support == "free" and math.isfinite(generator.slope_at_infinity)
        self.generator = generator
        self.path = Path(q, p, generator, free and not isinstance(divergence, MaxDivergence))

    def spent(self, point: Point) -> PerRow:
        """Return D(h‖q) of the bands."""
        if isinstance(self.divergence, Renyi):
            return self.divergence.from_alpha(point.divergence)
        if isinstance(self.divergence, MaxDivergence):
            return point.upper.log()
        return point.divergence

    def price(self, point: Point) -> PerRow:
        """Return dA/dδ at the bands."""
        if isinstance(self.divergence, MaxDivergence):
            cut = torch.where(self.p > point.upper[:, None] * self.q, self.q, 0.0)
            return point.upper * cut.sum(-1)
        price = 1 / point.slope
        if isinstance(self.divergence, Renyi):
            a = self.divergence.a
            price = price * ((a - 1) * self.spent(point)).exp() / a
        return price

    def strict_price(self) -> PerRow:
        """Return the price of the first bit of divergence, at h = q; 0 if it buys nothing."""
        if isinstance(self.divergence, MaxDivergence):
            return torch.where(self.p > self.q, self.q, 0.0).sum(-1)
        inside = torch.isfinite(self.p / self.q)
        cut = (inside & (self.p > self.q)).any(-1)
        leak = self._leak_price() if self.path.free_support else 0.0
        only_leak = torch.where(self.path.zero_mass > 0, leak, 0.0)
        first = math.inf if self.generator.smooth else 1.0
        return torch.where(cut, first, only_leak)

    def _leak_price(self) -> float:
        """Return dA/dδ at h = q where only tokens without target mass can gain."""
        f = self.generator
        kink = 0.0 if f.smooth else 0.5  # total variation also saves ½ where h < q
        price = 1 / (f.slope_at_infinity - f.slope_at_one + kink)
        return price / self.divergence.a if isinstance(self.divergence, Renyi) else price

    def for_budget(self, delta: PerRow) -> PerRow:
        """Return ε of the best band within ``delta``, on rows where the budget binds."""
        if isinstance(self.divergence, MaxDivergence):
            over = (self.p - delta.exp()[:, None] * self.q).clamp(min=0.0).sum(-1)
            return torch.minimum(torch.maximum(over, self.path.smallest), self.path.largest)
        budget = self.divergence.to_alpha(delta) if isinstance(self.divergence, Renyi) else delta
        return reject_for_budget(self.path, budget)

    def steep(self, point: Point, delta: PerRow) -> Point:
        """Return the band in rows where a and b met at 1 although there is a budget.

        Only tokens of ratios like 1e30 can gain there, and less than an ulp of ε, which says
        nothing about b: Σ_{p>q} q f(b) = δ does. Other rows are returned as they are.
        """
        f = self.generator
        met = (point.slope <= 0) & (delta > 0) & f.smooth
        if isinstance(self.divergence, MaxDivergence) or not bool(met.any()):
            return point
        budget = self.divergence.to_alpha(delta) if isinstance(self.divergence, Renyi) else delta
        cut = torch.isfinite(self.p / self.q) & (self.p > self.q)
        mass = torch.where(cut, self.q, 0.0).sum(-1)
        low, high = torch.zeros_like(mass), torch.full_like(mass, LARGEST_LOG)
        for _ in range(STEEP_STEPS):
            middle = (low + high) / 2
            within = mass * f.centred(middle.exp()) <= budget
            low, high = torch.where(within, middle, low), torch.where(within, high, middle)
        upper, one = low.exp(), torch.ones_like(low)
        slope = f.slope(upper) - f.slope_at_one
        met = met & (mass > 0) & (slope > 0)
        return Point(
            point.rejection,
            torch.where(met, one, point.lower),
            torch.where(met, upper, point.upper),
            torch.where(met, mass * f.centred(upper), point.divergence),
            torch.where(met, slope, point.slope),
        )

    def rows(self, point: Point) -> Rows:
        """Return clip(p, aq, bq); zero tokens of q get nothing, or their leak when free."""
        q, p, path = self.q, self.p, self.path
        inside = torch.isfinite(p / q)
        lifted = torch.maximum(p, point.lower[:, None] * q)
        ceiling = torch.where(inside, point.upper[:, None] * torch.where(inside, q, 1.0), 0.0)
        rows = torch.where(inside, torch.minimum(lifted, ceiling), 0.0)
        if path.free_support:
            leaked = (path.zero_mass - point.rejection).clamp(min=0.0)
            share = leaked / torch.where(path.zero_mass > 0, path.zero_mass, 1.0)
            rows = torch.where(inside, rows, p * share[:, None])
        whole = (point.rejection <= 0)[:, None]
        return torch.where(whole, p, rows)

    def bound(self, point: Point) -> PerRow:
        """Return the certified upper bound on the acceptance of any row within the budget."""
        q, p, f = self.q, self.p, self.generator
        if isinstance(self.divergence, MaxDivergence):
            return torch.minimum(p, point.upper[:, None] * q).sum(-1)
        lower, upper = point.lower[:, None], point.upper[:, None]
        price = 1 / point.slope
        level = -price * (f.slope(point.lower) - f.slope_at_one)
        inside = torch.isfinite(p / q)
        ratio = torch.where(inside, p / q, 1.0)
        u = torch.minimum(torch.maximum(ratio, lower), upper)
        costs = price[:, None] * f.centred(u) + level[:, None] * u
        terms = torch.where(inside, torch.minimum(p, u * q) - q * costs, 0.0)
        return price * point.divergence + level + terms.sum(-1)


def _locate(geometry: Geometry, knob: str, amount: PerRow) -> PerRow:
    """Return ε for the requested budget, price or acceptance."""
    path = geometry.path
    end = path.at(path.smallest)
    if knob == "delta":
        slack, strict = geometry.spent(end) <= amount, amount == 0
        found = geometry.for_budget(torch.where(slack | strict, 0.0, amount))
    elif knob == "price":
        slack, strict = amount <= geometry.price(end), amount == math.inf
        found = reject_for_price(path, amount, geometry.price)
    else:
        reachable = 1 - path.smallest
        if bool((amount > reachable + ACCEPTANCE_SLACK).any()):
            row = int((amount - reachable).argmax())
            raise ValueError(
                f"acceptance: must not exceed {reachable[row].item():.12g}, the draft's mass where "
                f"the target has any; got {amount[row].item():g}"
            )
        slack, strict = amount >= reachable, 1 - amount >= path.largest
        found = torch.minimum(torch.maximum(1 - amount, path.smallest), path.largest)
    found = torch.where(slack, path.smallest, found)
    return torch.where(strict, path.largest, found)


@dataclass(frozen=True)
class Band:
    """The solved bands of some rows: edges, and where an end of the path was reached."""

    geometry: Geometry
    point: Point
    strict: Bool[Tensor, "rows"]
    slack: Bool[Tensor, "rows"]

    def rows(self) -> Rows:
        """Return h; q itself at the strict end."""
        return torch.where(self.strict[:, None], self.geometry.q, self.geometry.rows(self.point))

    def scalars(self, rows: Rows) -> dict[str, PerRow]:
        """Return the scalars of :class:`OptimalAcceptance` for these rows."""
        geometry, point, strict = self.geometry, self.point, self.strict
        accepted = torch.minimum(geometry.p, rows).sum(-1)
        price = torch.where(strict, geometry.strict_price(), geometry.price(point))
        gap = geometry.bound(point) - accepted
        return {
            "acceptance": accepted,
            "divergence": torch.where(strict, 0.0, geometry.divergence.value(rows, geometry.q)),
            "lower": torch.where(strict, 1.0, point.lower),
            "upper": torch.where(strict, 1.0, point.upper),
            "price": torch.where(self.slack, 0.0, price),
            "gap": torch.where(strict | self.slack, 0.0, gap),
        }


def solve_band(geometry: Geometry, knob: str, amount: PerRow) -> Band:
    """Return the bands for ``knob`` (delta, price or acceptance) at ``amount`` per row."""
    path = geometry.path
    rejection = _locate(geometry, knob, amount)
    strict = rejection >= path.largest
    slack = (rejection <= path.smallest) & ~strict
    point = path.at(rejection)
    if knob == "delta" and isinstance(geometry.divergence, MaxDivergence):
        # ε says little about b when the tokens cut are all but impossible; the budget says it
        point = replace(point, upper=torch.where(strict | slack, point.upper, amount.exp()))
    elif knob == "delta":
        point = geometry.steep(point, torch.where(strict | slack, 0.0, amount))
    return Band(geometry, point, strict, slack)


def chosen_knob(divergence: Divergence, **knobs: Any) -> tuple[str, Any, float]:
    """Return the one knob that was given, with its upper limit."""
    given = [name for name, value in knobs.items() if value is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "none of them"
        raise ValueError(f"delta, price, acceptance: exactly one must be given; got {shown}")
    flat = isinstance(divergence, TotalVariation) or not divergence.concave_frontier
    if given[0] == "price" and flat:
        raise ValueError(
            f"price: {divergence.spec} has no one-to-one price; name delta= or acceptance= "
            f"instead; got {knobs['price']!r}"
        )
    return given[0], knobs[given[0]], 1.0 if given[0] == "acceptance" else math.inf


def optimal_acceptance(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    delta: Any = None,
    price: Any = None,
    acceptance: Any = None,
    support: str = "target",
) -> OptimalAcceptance:
    r"""Maximise acceptance under a bound on the divergence of what is emitted.

    .. math:: \max_{h \in \Delta} \sum_i \min(p_i, h_i) \;\text{ s.t. }\; D(h\|q) \le \delta

    Exact up to float64 rounding for every listed divergence: one sort by p/q, then lookups.

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, torch or numpy, one dtype; rows may
        miss 1 by the dtype's tolerance and are divided by their float64 sum.
    divergence : spec string (``kl``, ``renyi:a=2``, …) or a Divergence.
    delta : budget ≥ 0 (nats for KL), a number or an array broadcasting to (...).
    price : instead of delta, dA/dδ ≥ 0 at which to stop; the same price on all rows is the
        best way to spend a common budget.
    acceptance : instead of delta, the acceptance to reach at the least divergence; rows
        that reach it losslessly keep h = q.
    support : ``target`` never emits a token with q = 0; ``free`` solves the program as posed.

    Raises
    ------
    ValueError
        Not a distribution, a knob missing or outside its range, an unknown divergence.
    TypeError
        Rows that are not floats or of two dtypes.
    """
    kind = find_divergence(divergence)
    name, amount, most = chosen_knob(kind, delta=delta, price=price, acceptance=acceptance)
    check.one_of("support", support, SUPPORTS)
    q, p = check.probability_rows(target_probs, draft_probs)
    batch = q.shape[:-1]
    amounts = check.row_numbers(name, amount, batch, q.device, 0.0, most)
    flat_q, flat_p = q.reshape(-1, q.shape[-1]), p.reshape(-1, q.shape[-1])
    band = solve_band(Geometry(flat_q, flat_p, kind, support), name, amounts.reshape(-1))
    rows = band.rows()
    shaped = {
        name: check.scalar_like(value.reshape(batch), target_probs)
        for name, value in band.scalars(rows).items()
    }
    return OptimalAcceptance(target=check.like(rows.reshape(q.shape), target_probs), **shaped)


def frontier(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    points: int = 64,
    support: str = "target",
) -> Frontier:
    """Return the whole optimal trade-off of each row from one sort.

    Points are equally spaced in acceptance, from lossless (δ = 0) to the end of the path.
    Shapes (..., points); δ and acceptance rise along the last axis, the price falls.

    Raises
    ------
    ValueError
        As for :func:`optimal_acceptance`, or fewer than two points.
    """
    kind = find_divergence(divergence)
    check.one_of("support", support, SUPPORTS)
    count = int(check.number("points", points, 2))
    if count != points:
        raise ValueError(f"points: must be a whole number; got {points!r}")
    q, p = check.probability_rows(target_probs, draft_probs)
    geometry = Geometry(q.reshape(-1, q.shape[-1]), p.reshape(-1, q.shape[-1]), kind, support)
    path = geometry.path
    curves: list[list[Tensor]] = [[], [], []]
    for share in torch.linspace(1, 0, count, dtype=torch.float64).tolist():
        point = path.at(path.smallest + share * (path.largest - path.smallest))
        strict = torch.tensor(share == 1.0, device=q.device)
        spent = torch.where(strict, 0.0, geometry.spent(point))
        price = torch.where(strict, geometry.strict_price(), geometry.price(point))
        for curve, value in zip(curves, (spent, 1 - point.rejection, price), strict=True):
            curve.append(value)
    shape = (*q.shape[:-1], count)
    stacked = (torch.stack(curve, -1).reshape(shape) for curve in curves)
    return Frontier(*(check.scalar_like(curve, target_probs) for curve in stacked))
