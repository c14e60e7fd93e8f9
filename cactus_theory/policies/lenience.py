"""Lenience, the relaxation in the appendix of the first speculative decoding paper."""

import math
from dataclasses import dataclass

from cactus_theory.base import arguments as check
from cactus_theory.policies._base_classes import Raised
from cactus_theory.policies._decisions import Budget, Declaration
from cactus_theory.policies._policy import Entries
from cactus_theory.policies._registry import register


@register("lenience")
@dataclass(frozen=True)
class Lenience(Raised):
    r"""Accept n with :math:`\min(1, q_n/(ℓ p_n))`, 0 < ℓ ≤ 1.

    No token is emitted with more than :math:`q_n/ℓ`, and no policy with that guarantee accepts
    more: A = Σ min(p, q/ℓ) is the optimum for the max-divergence with δ = −ln ℓ.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5.
    """

    lenience: float
    knob = "lenience"

    def __post_init__(self) -> None:
        value = check.number("lenience", self.lenience, 0, 1, open_low=True)
        object.__setattr__(self, "lenience", value)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted max-divergence within −ln ℓ, and optimal for it."""
        budget = Budget("max_divergence", -math.log(self.lenience), "emitted")
        return Declaration(-1, 1.0, budget, between=True, at_least_speculative=True, optimal=True)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return q_n/ℓ."""
        return q_n / self.lenience
