"""The lossy acceptance tests of DistillSpec."""

import math
from dataclasses import dataclass

from cactus_theory.base import arguments as check
from cactus_theory.policies._base_classes import Raised
from cactus_theory.policies._decisions import Budget, Declaration
from cactus_theory.policies._policy import Entries
from cactus_theory.policies._registry import register

FORMS = ("lin", "sq", "exp")


@register("distillspec")
@dataclass(frozen=True)
class DistillSpec(Raised):
    r"""Accept n with min(1, r(q_n)/p_n): r(q) = q/ε (lin), q/ε² (sq) or :math:`q^ε` (exp).

    ``lin`` is lenience ε and ``sq`` lenience ε²: both bound the emitted max-divergence. With
    ``exp`` a rare token may be raised without bound. Source: Zhou et al. 2024 (DistillSpec,
    arXiv 2310.08461), section 5.3.
    """

    epsilon: float
    form: str = "lin"
    knob = "epsilon"

    def __post_init__(self) -> None:
        value = check.number("epsilon", self.epsilon, 0, 1, open_low=True)
        object.__setattr__(self, "epsilon", value)
        check.one_of("form", self.form, FORMS)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted max-divergence within −ln ε or −2 ln ε; no budget for exp."""
        budget = None
        if self.form != "exp":
            amount = -math.log(self.epsilon) * (2 if self.form == "sq" else 1)
            budget = Budget("max_divergence", amount, "emitted")
        return Declaration(
            -1, 1.0, budget, between=True, at_least_speculative=True, optimal=budget is not None
        )

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return r(q_n)."""
        if self.form == "exp":
            return q_n.pow(self.epsilon)
        return q_n / (self.epsilon if self.form == "lin" else self.epsilon**2)
