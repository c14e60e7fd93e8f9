"""Cactus as published."""

import math
import sys
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._per_proposal import PerProposal
from cactus_theory.policies._registry import register

# 2δ beyond it would be ∞, and ∞·0 is no number
MOST = sys.float_info.max


@register("cactus")
@dataclass(frozen=True)
class Cactus(PerProposal):
    r"""Raise the drafted token by the published second-order formula.

    .. math:: \gamma_n = \min\{1,\; q_n + \sqrt{2\delta\, q_n (1 - q_n)}\}

    Exact for Pearson chi-square with budget :math:`2\delta`; its KL can reach
    :math:`\ln(1 + 2\delta)`. Delta is meant as a per-proposal KL budget in nats, which is
    what audits check. Source: Hao & Mou 2026, Corollary 5; THEORY.md, Theorems 2 and 6.
    """

    delta: float
    knob = "delta"

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check.number("delta", self.delta, 0))

    @property
    def declares(self) -> Declaration:
        """Return: KL of every proposal within delta, which does not always hold."""
        budget = Budget("kl", self.delta, "per proposal")
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True)

    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ for finite delta; ``PerProposal`` handles the limits."""
        return ((1 - q_n) * q_n).mul_(min(2 * self.delta, MOST)).sqrt_().add_(q_n).clamp_(max=1.0)

    def gamma(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ, whose formula already is 0 at 0, 1 at 1 and never below q_n."""
        if not 0 < self.delta < math.inf:
            return super().gamma(q_n)
        return self.raised(q_n.double().clamp(max=1.0))
