"""The registered divergences: f-divergences, with or without an order, Rényi and max-divergence.

:class:`FDivergence` documents the members of each class.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.divergences.definition import (
    SAFE_RATIO,
    Divergence,
    FDivergence,
    register_divergence,
)

# from LONG tokens on, KL is summed in half the passes, from terms of both signs, right to 1e-15;
# below ROUNDED nats this would be mostly rounding, so terms ≥ 0 are summed instead
LONG, ROUNDED = 4096, 1e-6


def log_in_place(t: Tensor) -> Tensor:
    """Return ln t, written over t; on a CPU numpy takes a third of torch's time."""
    if t.is_cuda or t.requires_grad or t.dtype not in (torch.float32, torch.float64):
        return t.log_()
    np.log(t.numpy(), out=t.numpy())
    return t


@register_divergence
class KL(FDivergence):
    """KL(h‖q): f = t ln t."""

    name = "kl"
    slope_at_one = 1.0

    def f(self, t: Tensor) -> Tensor:
        # takes half the time of xlogy
        return t.clamp(min=torch.finfo(t.dtype).tiny).log_().mul_(t)

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        h, q = tensors.float64_rows(emitted, target)
        if h.shape != q.shape or not h.numel() or h.shape[-1] < LONG or h.is_cuda:
            return super().value(h, q)
        logs = (h / q).clamp_(min=SAFE_RATIO)
        # Σ h ln(h/q), less Σ (h − q): the sum of the centred terms
        value = (log_in_place(logs)[..., None, :] @ h[..., None])[..., 0, 0] + (
            q.sum(-1) - h.sum(-1)
        )
        sure = (value >= ROUNDED) | (value == 0)  # False for NaN (h = q = 0)
        return value if bool(sure.all()) else super().value(h, q)

    def centred(self, t: Tensor) -> Tensor:
        result = t.clamp(min=torch.finfo(t.dtype).tiny)
        # t ln t and the exact t − 1 are small near 1: no term of size 1 is rounded
        return log_in_place(result).mul_(t).sub_(t - 1)

    def slope(self, t: Tensor) -> Tensor:
        return t.log() + 1

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (y - 1).exp()

    def upper_edge(self, step: float) -> float:
        return math.exp(step) if step < 700 else math.inf  # e^710 is infinite

    def curvature(self, t: Tensor) -> Tensor:
        return 1 / t


@register_divergence
class ReverseKL(FDivergence):
    """KL(q‖h): f = −ln t. The optimum is mentored decoding (Tran-Thien 2023)."""

    name = "reverse_kl"
    at_zero = math.inf
    slope_at_infinity = 0.0
    slope_at_one = -1.0

    def f(self, t: Tensor) -> Tensor:
        return -t.log()

    def slope(self, t: Tensor) -> Tensor:
        return -1 / t

    def slope_inverse(self, y: Tensor) -> Tensor:
        return -1 / y

    def curvature(self, t: Tensor) -> Tensor:
        return t**-2


@register_divergence
class TotalVariation(FDivergence):
    """½Σ|h − q|: f = ½|t − 1|, with a kink at 1 and no curvature elsewhere."""

    name = "total_variation"
    at_zero = 0.5
    slope_at_infinity = 0.5
    kink = 1.0
    smooth = False
    linear = True

    def f(self, t: Tensor) -> Tensor:
        return (t - 1).abs() / 2

    def slope(self, t: Tensor) -> Tensor:
        return torch.sign(t - 1) / 2


class Power(FDivergence):
    """A divergence with f″ = w t^(a − 2), of order a ∉ {0, 1} and weight w; f′(1) = 0."""

    a: float
    weight = 1.0

    @property
    def at_zero(self) -> float:  # type: ignore[override]
        return self.weight / self.a if self.a > 0 else math.inf

    @property
    def slope_at_infinity(self) -> float:  # type: ignore[override]
        return math.inf if self.a > 1 else self.weight / (1 - self.a)

    def slope(self, t: Tensor) -> Tensor:
        return self.weight * (t ** (self.a - 1) - 1) / (self.a - 1)

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 + (self.a - 1) / self.weight * y) ** (1 / (self.a - 1))

    def curvature(self, t: Tensor) -> Tensor:
        return self.weight * t ** (self.a - 2)


@register_divergence
class PearsonChi2(Power):
    """Σ(h − q)²/q: f = (t − 1)². Its per-proposal optimum is the published Cactus rule."""

    name, a, weight = "pearson_chi2", 2.0, 2.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) ** 2


@register_divergence
class NeymanChi2(Power):
    """Σ(h − q)²/h: f = (t − 1)²/t."""

    name, a, weight = "neyman_chi2", -1.0, 2.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) * (1 - 1 / t)


@register_divergence
class SquaredHellinger(Power):
    """Σ(√h − √q)²: f = (√t − 1)², between 0 and 2."""

    name, a, weight = "squared_hellinger", 0.5, 0.5

    def f(self, t: Tensor) -> Tensor:
        return (t.sqrt() - 1) ** 2


@register_divergence
class JensenShannon(FDivergence):
    """Mean KL of h and q to their mixture: f = ½[t ln t − (1+t) ln((1+t)/2)]."""

    name = "jensen_shannon"
    at_zero = math.log(2) / 2
    slope_at_infinity = math.log(2) / 2

    def f(self, t: Tensor) -> Tensor:
        # ½[−t·ln((1+1/t)/2) − ln((1+t)/2)] avoids the cancellation of t ln t at large t
        half = (t - 1) / 2
        # torch 2.6 returns ∞ for log1p beyond 1e307
        least = max(SAFE_RATIO, torch.finfo(t.dtype).tiny)
        first = t * torch.log1p(-half / t.clamp(min=least))
        return (first + torch.log1p(half.clamp(max=1 / least))) / -2

    def slope(self, t: Tensor) -> Tensor:
        return (math.log(2) - torch.log1p(1 / t)) / 2

    def slope_inverse(self, y: Tensor) -> Tensor:
        doubled = (2 * y).exp()
        return doubled / (2 - doubled)

    def curvature(self, t: Tensor) -> Tensor:
        return 0.5 / (t * (1 + t))


@register_divergence
class MaxDivergence(Divergence):
    """ln max h/q, the Rényi divergence of infinite order: h ≤ e^δ q pointwise."""

    name = "max_divergence"
    concave_frontier = False
    linear = True

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        h, q = tensors.float64_rows(emitted, target)
        ratio = torch.where(h == 0, 0.0, h / q)
        return ratio.amax(-1).log().clamp(min=0.0)

    def ceiling(self, delta: Tensor) -> Tensor:
        return delta.exp()

    def from_ceiling(self, ratio: Tensor) -> Tensor:
        return ratio.log()

    def ceiling_slope(self, ratio: Tensor) -> Tensor:
        return ratio


# Rows with Σ h^a q^{1−a} − 1 below FAR share less than half: the sum itself is computed, as its
# digits would be lost in the difference from 1
FAR = -0.5


@register_divergence
@dataclass(frozen=True)
class Alpha(Power):
    """The alpha divergence, f = (t^a − at + a − 1)/(a(a−1)), a ∉ {0, 1}.

    Limits: a → 1 is kl, a → 0 is reverse_kl. a = 2 gives ½ pearson_chi2, a = ½ gives
    2 squared_hellinger, a = −1 gives ½ neyman_chi2. Orders below −16 or above 16 overflow on
    ordinary rows and raise ValueError.
    """

    a: float

    name = "alpha"
    example = {"a": 0.5}

    def __post_init__(self) -> None:
        if check.number("a", self.a, -16, 16) in (0.0, 1.0):
            raise ValueError(f"a: must not be 0 or 1 (use reverse_kl or kl); got {self.a!r}")
        super().__post_init__()

    def f(self, t: Tensor) -> Tensor:
        # t^a would round at the size of 1, and near t = 1 the result is much smaller
        return ((self.a * t.log()).expm1() - self.a * (t - 1)) / (self.a * (self.a - 1))


@register_divergence
@dataclass(frozen=True)
class Renyi(Divergence):
    """ln Σ h^a q^{1−a} / (a − 1), a > 0, a ≠ 1: an increasing function of ``alpha:a``."""

    a: float

    name = "renyi"
    example = {"a": 2.0}

    def __post_init__(self) -> None:
        if check.number("a", self.a, 0, 16, open_low=True) == 1:
            raise ValueError(f"a: must not be 1 (use kl); got {self.a!r}")
        super().__post_init__()

    @property
    def concave_frontier(self) -> bool:  # type: ignore[override]
        return self.a < 1

    @property
    def generator(self) -> Alpha:  # type: ignore[override]
        return Alpha(self.a)

    def to_generator(self, delta: Tensor) -> Tensor:
        budget = torch.expm1((self.a - 1) * delta) / (self.a * (self.a - 1))
        # a finite budget stays finite: rows whose D_f overflows float64 are not within the budget
        return torch.where(delta < math.inf, budget.clamp(max=1e308), budget)

    def from_generator(self, value: Tensor) -> Tensor:
        return torch.log1p((self.a * (self.a - 1) * value).clamp(min=-1)) / (self.a - 1)

    def price_from_generator(self, price: Tensor, value: Tensor) -> Tensor:
        return price * ((self.a - 1) * value).exp() / self.a

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        generated = self.generator.value(emitted, target)
        far = self.a * (self.a - 1) * generated < FAR
        if not bool(far.any()):
            return self.from_generator(generated)
        h, q = tensors.float64_rows(emitted, target)
        sums = (h**self.a * q ** (1 - self.a)).sum(-1)
        return torch.where(far, sums.log() / (self.a - 1), self.from_generator(generated))
