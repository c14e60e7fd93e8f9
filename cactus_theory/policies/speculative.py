"""Lossless speculative sampling."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies._base import FixedTarget, Ids, Rows, keep_probability
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._registry import register


@register("speculative")
@dataclass(frozen=True)
class Speculative(FixedTarget):
    """Keep n with min(1, q_n/p_n): the emitted law is q, exactly.

    Source: Leviathan et al. 2023; Chen et al. 2023.
    """

    @property
    def declares(self) -> Declaration:
        """Return: lossless."""
        budget = Budget("kl", 0.0, "emitted")
        return Declaration(budget=budget, between=True, at_least_speculative=True)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return q."""
        return q

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, q_n/p_n): only the drafted entries are read."""
        q_n = q.gather(-1, n).double()
        return q_n if p is None else keep_probability(q_n, p.gather(-1, n).double())
