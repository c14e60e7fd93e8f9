"""The f-divergences without a knob; see :class:`FDivergence` for what each member means."""

import math

import torch
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.divergences._base import FDivergence
from cactus_theory.divergences._registry import register_divergence

LARGEST_EXPONENT = 700.0  # e^x is finite in float64 up to here


@register_divergence
class KL(FDivergence):
    """KL(h‖q): f = t ln t."""

    name = "kl"
    slope_at_one = 1.0
    scale_free = True

    def f(self, t: Tensor) -> Tensor:
        # twice as fast as xlogy
        return t.clamp(min=torch.finfo(t.dtype).tiny).log_().mul_(t)

    def centred(self, t: Tensor, out: Tensor | None = None) -> Tensor:
        result = torch.clamp(t, min=torch.finfo(t.dtype).tiny, out=out)
        # t ln t and the exact t - 1 are small near 1: nothing of the size of 1 is rounded
        excess = torch.sub(t, 1, out=scratch("kl", t.shape, t.dtype, t.device))
        return result.log_().mul_(t).sub_(excess)

    def slope(self, t: Tensor) -> Tensor:
        return t.log() + 1

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (y - 1).exp()

    def lower_edge(self, upper: float, step: float) -> float:
        return upper * math.exp(-step)

    def upper_edge(self, lower: float, step: float) -> float:
        return lower * math.exp(step) if step < LARGEST_EXPONENT else math.inf

    def ratio_at(self, y: Tensor) -> Tensor:
        return self.slope_inverse(y)  # f′ takes every value

    def curvature(self, t: Tensor) -> Tensor:
        return 1 / t


@register_divergence
class ReverseKL(FDivergence):
    """KL(q‖h): f = −ln t. The optimum under it is mentored decoding (Tran-Thien 2023)."""

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

    def slope_inverse(self, y: Tensor) -> Tensor:
        raise ValueError("divergence: total_variation has no inverse slope; got total_variation")


@register_divergence
class PearsonChi2(FDivergence):
    """Σ(h − q)²/q: f = (t − 1)². Its per-proposal optimum is the published Cactus rule."""

    name = "pearson_chi2"
    at_zero = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) ** 2

    def slope(self, t: Tensor) -> Tensor:
        return 2 * (t - 1)

    def slope_inverse(self, y: Tensor) -> Tensor:
        return 1 + y / 2

    def curvature(self, t: Tensor) -> Tensor:
        return torch.full_like(t, 2.0)


@register_divergence
class NeymanChi2(FDivergence):
    """Σ(h − q)²/h: f = (t − 1)²/t."""

    name = "neyman_chi2"
    at_zero = math.inf
    slope_at_infinity = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t - 1) * (1 - 1 / t)

    def slope(self, t: Tensor) -> Tensor:
        return 1 - t**-2

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 - y) ** -0.5

    def curvature(self, t: Tensor) -> Tensor:
        return 2 * t**-3


@register_divergence
class SquaredHellinger(FDivergence):
    """Σ(√h − √q)²: f = (√t − 1)², between 0 and 2."""

    name = "squared_hellinger"
    at_zero = 1.0
    slope_at_infinity = 1.0

    def f(self, t: Tensor) -> Tensor:
        return (t.sqrt() - 1) ** 2

    def slope(self, t: Tensor) -> Tensor:
        return 1 - t**-0.5

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 - y) ** -2

    def curvature(self, t: Tensor) -> Tensor:
        return t**-1.5 / 2


@register_divergence
class JensenShannon(FDivergence):
    """Mean KL of h and q to their mixture: f = ½[t ln t − (1+t) ln((1+t)/2)]."""

    name = "jensen_shannon"
    at_zero = math.log(2) / 2
    slope_at_infinity = math.log(2) / 2

    def f(self, t: Tensor) -> Tensor:
        # ½[−t·ln((1+1/t)/2) − ln((1+t)/2)] avoids the cancellation of t ln t at large t
        half = (t - 1) / 2
        first = t * torch.log1p(-half / t.clamp(min=torch.finfo(t.dtype).tiny))
        return (first + torch.log1p(half)) / -2

    def slope(self, t: Tensor) -> Tensor:
        return (math.log(2) - torch.log1p(1 / t)) / 2

    def slope_inverse(self, y: Tensor) -> Tensor:
        doubled = (2 * y).exp()
        return doubled / (2 - doubled)

    def curvature(self, t: Tensor) -> Tensor:
        return 0.5 / (t * (1 + t))
