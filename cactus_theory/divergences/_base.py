r"""What a divergence is, and the geometry that the optimum needs from it.

Every f-divergence is :math:`D_f(h\|q) = \sum_{q>0} q f(h/q) + f'(\infty)\,h(q=0)` with convex
f, f(1) = 0. Others are increasing functions of one (Rényi), so that their budgets translate, or
bound the ratio h/q pointwise (max-divergence). The optimum and the solvers use only what is
declared here and never ask which divergence it is.
Source of the definitions: Csiszár 1967; Liese & Vajda 2006; van Erven & Harremoës 2014.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from cactus_theory.base import arguments as check

SAFE_RATIO = 1e-300  # a probability over one above this is finite
# relative step of the finite difference that stands in for f″
CURVATURE_STEP = 1e-5


@dataclass(frozen=True)
class Divergence:
    """A divergence D(h‖q) in nats (or its own unit), 0 iff h = q; knobs are dataclass fields.

    Attributes
    ----------
    name : the spec's name; ``spec`` adds the knobs.
    example : knobs of the member that stands for the family in audits and tables.
    generator : the f-divergence that a budget translates to; None where the budget bounds
        h/q pointwise, by ``ceiling``.
    concave_frontier : whether the best acceptance is concave in the budget.
    priced : whether it is strictly concave, so that every price names one budget.
    linear : whether D ≤ δ is a set of linear constraints on h.
    additive : whether a sum of values over positions is a convex budget on their rows.
    """

    name = "divergence"
    example: ClassVar[Mapping[str, float]] = {}
    concave_frontier = True
    linear = False
    additive = False

    def __post_init__(self) -> None:
        for knob in fields(self):  # they may come as text, from a spec
            value = check.number(knob.name, getattr(self, knob.name), -math.inf)
            object.__setattr__(self, knob.name, value)

    @property
    def spec(self) -> str:
        """Return the one string that names this divergence everywhere, with all its digits."""
        values = {knob.name: _digits(getattr(self, knob.name)) for knob in fields(self)}
        knobs = ",".join(f"{name}={value}" for name, value in values.items())
        return f"{self.name}:{knobs}" if knobs else self.name

    @property
    def generator(self) -> "FDivergence | None":
        """Return the f-divergence that a budget translates to."""
        raise NotImplementedError

    @property
    def priced(self) -> bool:
        """Return whether price and budget determine one another."""
        generator = self.generator
        return self.concave_frontier and generator is not None and generator.smooth

    @property
    def pools(self) -> bool:
        """Return whether a mean over rows is a budget that one price shares best among them."""
        return self.additive and self.priced

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...)."""
        raise NotImplementedError

    def to_generator(self, delta: Tensor) -> Tensor:
        """Return the generator's budget that is equivalent to a budget of ``delta``."""
        return delta

    def from_generator(self, value: Tensor) -> Tensor:
        """Return the divergence of rows whose generator has this value."""
        return value

    def price_from_generator(self, price: Tensor, value: Tensor) -> Tensor:
        """Return dA/dδ where the generator's is ``price`` and D is ``value``."""
        return price

    def ceiling(self, delta: Tensor) -> Tensor:
        """Return the h/q that a budget of ``delta`` allows, where ``generator`` is None."""
        raise NotImplementedError

    def from_ceiling(self, ratio: Tensor) -> Tensor:
        """Return the budget with this ceiling."""
        raise NotImplementedError

    def ceiling_slope(self, ratio: Tensor) -> Tensor:
        """Return by how much the ceiling rises per unit of budget, where it is ``ratio``."""
        raise NotImplementedError


@dataclass(frozen=True)
class FDivergence(Divergence):
    """A divergence given by a convex generator f with f(1) = 0: its own generator.

    Attributes
    ----------
    at_zero : f(0), possibly infinite.
    slope_at_infinity : f′(∞), possibly infinite.
    slope_at_one : f′(1); subtracting slope_at_one·(t−1) leaves the divergence unchanged. At a
        kink, the middle of the two one-sided slopes.
    kink : how much f′ jumps at 1.
    smooth : whether f is differentiable and strictly convex.
    scale_free : whether f′(b) − f′(a) depends on b/a alone.
    """

    at_zero = 0.0
    slope_at_infinity = math.inf
    slope_at_one = 0.0
    kink = 0.0
    smooth = True
    scale_free = False
    additive = True

    @property
    def generator(self) -> "FDivergence":
        """Return the divergence itself."""
        return self

    def f(self, t: Tensor) -> Tensor:
        """Return the generator at the ratio t = h/q ≥ 0."""
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        """Return f′(t)."""
        raise NotImplementedError

    def slope_inverse(self, y: Tensor) -> Tensor:
        """Return the ratio t with f′(t) = y, for y in the range of f′."""
        raise NotImplementedError

    def curvature(self, t: Tensor) -> Tensor:
        """Return f″(t), here by a central difference of f′ good to about nine digits.

        Only speed depends on it: a class may give it exactly.
        """
        step = CURVATURE_STEP * t
        return (self.slope(t + step) - self.slope(t - step)) / (2 * step)

    def centred(self, t: Tensor, out: Tensor | None = None) -> Tensor:
        """Return f(t) − f′(1)(t−1), which is never negative and sums to the same divergence.

        ``out`` is memory of t's shape that a class may write the result to, to save the time
        that fresh memory takes; what is returned need not be there.
        """
        if self.slope_at_one == 0:
            return self.f(t)
        return self.f(t).sub_(t - 1, alpha=self.slope_at_one)

    def centred_slope(self, t: Tensor) -> Tensor:
        """Return f′(t) − f′(1), the derivative of ``centred``."""
        return self.slope(t) - self.slope_at_one

    def ratio_at(self, y: Tensor) -> Tensor:
        """Return the ratio where f′ reaches y: 0 below its range, ∞ above it."""
        low, high = self.slope(torch.full_like(y, SAFE_RATIO)), self.slope_at_infinity
        inside = (y > low) & (y < high)
        ratio = self.slope_inverse(torch.where(inside, y, self.slope_at_one))
        return torch.where(inside, ratio, torch.where(y >= high, torch.inf, 0.0))

    def lower_edge(self, upper: float, step: float) -> float:
        """Return a ≥ 0 with f′(b) − f′(a) = ``step``, 0 where f′ does not fall that far."""
        return float(self.ratio_at(self.slope(_scalar(upper)) - step))

    def upper_edge(self, lower: float, step: float) -> float:
        """Return b with f′(b) − f′(a) = ``step``, ∞ where f′ does not rise that far."""
        return float(self.ratio_at(self.slope(_scalar(lower)) + step))

    def two_points(self, raised: Tensor, q_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return q f(γ/q) + (1−q) f((1−γ)/(1−q)) and its derivative in γ.

        That is the least D of any row with h_n = γ.
        """
        rest = 1 - q_n
        up, down = raised / q_n, (1 - raised) / rest
        value = q_n * self.centred(up) + rest * self.centred(down)
        return value, self.slope(up) - self.slope(down)

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        """Return D(emitted‖target) of rows (..., V) as float64 (...)."""
        h, q = emitted.double(), target.double()
        ratio = h / q
        if not q.numel() or float(q.amin()) > SAFE_RATIO:  # no ratio overflows: three passes fewer
            return self.centred(ratio).mul_(q).sum(-1).clamp_(min=0.0)
        inside = torch.isfinite(ratio)  # q = 0, or so small that h/q overflows
        terms = torch.where(inside, q * self.centred(torch.where(inside, ratio, 1.0)), 0.0)
        outside = torch.where(inside, 0.0, h).sum(-1)
        price = self.slope_at_infinity - self.slope_at_one
        whole = terms.sum(-1) + torch.where(outside == 0, 0.0, outside * price)
        return whole.clamp_(min=0.0)  # a rounded sum may lie below


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _digits(value: float) -> str:
    """Return the shortest text that reads as the same number: ``2`` for 2.0."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
