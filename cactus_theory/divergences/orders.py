"""The families with an order a: alpha divergences and Rényi's increasing functions of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.divergences._base import Divergence, FDivergence
from cactus_theory.divergences._registry import register_divergence

# rows that share less than half, by the sum of h^a q^{1−a}: the sum itself, as 1 less almost 1
# would lose its digits
FAR = -0.5


@register_divergence
@dataclass(frozen=True)
class Alpha(FDivergence):
    """The alpha divergence, f = (t^a − at + a − 1)/(a(a−1)), a ∉ {0, 1}.

    Limits: a → 1 is kl, a → 0 is reverse_kl. a = 2 is ½ Pearson, ½ is 2 Hellinger,
    −1 is ½ Neyman. Orders below −16 or above 16 overflow on ordinary rows and are refused.
    """

    a: float

    name = "alpha"
    example = {"a": 0.5}

    def __post_init__(self) -> None:
        a = check.number("a", self.a, -16, 16)
        if a in (0.0, 1.0):
            raise ValueError(f"a: must not be 0 or 1 (use reverse_kl or kl); got {self.a!r}")
        object.__setattr__(self, "a", a)

    @property
    def at_zero(self) -> float:  # type: ignore[override]
        return 1 / self.a if self.a > 0 else math.inf

    @property
    def slope_at_infinity(self) -> float:  # type: ignore[override]
        return math.inf if self.a > 1 else 1 / (1 - self.a)

    def f(self, t: Tensor) -> Tensor:
        # t^a would round what is of the size of 1, and near 1 the rest is much smaller
        return ((self.a * t.log()).expm1() - self.a * (t - 1)) / (self.a * (self.a - 1))

    def slope(self, t: Tensor) -> Tensor:
        return (t ** (self.a - 1) - 1) / (self.a - 1)

    def slope_inverse(self, y: Tensor) -> Tensor:
        return (1 + (self.a - 1) * y) ** (1 / (self.a - 1))

    def curvature(self, t: Tensor) -> Tensor:
        return t ** (self.a - 2)


@register_divergence
@dataclass(frozen=True)
class Renyi(Divergence):
    """ln Σ h^a q^{1−a} / (a − 1), a > 0, a ≠ 1: an increasing function of ``alpha:a``."""

    a: float

    name = "renyi"
    example = {"a": 2.0}

    def __post_init__(self) -> None:
        a = check.number("a", self.a, 0, 16, open_low=True)
        if a == 1:
            raise ValueError(f"a: must not be 1 (use kl); got {self.a!r}")
        object.__setattr__(self, "a", a)

    @property
    def concave_frontier(self) -> bool:  # type: ignore[override]
        return self.a < 1

    @property
    def generator(self) -> Alpha:
        """Return the alpha divergence of the same order."""
        return Alpha(self.a)

    def to_generator(self, delta: Tensor) -> Tensor:
        """Return the alpha-divergence budget equal to a Rényi budget of ``delta`` nats."""
        return torch.expm1((self.a - 1) * delta) / (self.a * (self.a - 1))

    def from_generator(self, value: Tensor) -> Tensor:
        """Return the Rényi divergence in nats of rows with this alpha divergence."""
        return torch.log1p((self.a * (self.a - 1) * value).clamp(min=-1)) / (self.a - 1)

    def price_from_generator(self, price: Tensor, value: Tensor) -> Tensor:
        """Return λ_α e^{(a−1)D}/a, as dδ_α/dδ = e^{(a−1)δ}/a."""
        return price * ((self.a - 1) * value).exp() / self.a

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        generated = self.generator.value(emitted, target)
        far = self.a * (self.a - 1) * generated < FAR
        if not bool(far.any()):
            return self.from_generator(generated)
        h, q = emitted.double(), target.double()
        sums = (h**self.a * q ** (1 - self.a)).sum(-1)
        return torch.where(far, sums.log() / (self.a - 1), self.from_generator(generated))

    to_alpha, from_alpha = to_generator, from_generator
