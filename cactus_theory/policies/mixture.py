"""Verify against a mixture of the two models."""

from dataclasses import dataclass

import torch

from cactus_theory.base import arguments as check
from cactus_theory.policies._base_classes import Raised
from cactus_theory.policies._decisions import SUPPORTS, Budget, Declaration, Support
from cactus_theory.policies._policy import Entries
from cactus_theory.policies._registry import register


@register("mixture")
@dataclass(frozen=True)
class Mixture(Raised):
    r"""Lossless sampling on :math:`h = αp + (1−α)q`.

    TV(h, q) = α TV(p, q), and no policy within that much total variation accepts more:
    A = 1 − (1−α) TV(p, q). Tokens that the target excludes are refused, and what they would
    get goes to (q − p)₊; with ``support="free"``, as published, they are emitted. Hugging
    Face's ``assistant_ensemble_weight`` is 1 − α, with free support. Source: the interpolation
    baseline of Hao & Mou 2026 (arXiv 2604.04987).
    """

    alpha: float
    support: Support = "target"
    knob = "alpha"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", check.number("alpha", self.alpha, 0, 1))
        check.one_of("support", self.support, SUPPORTS)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted total variation within α."""
        budget = Budget("total_variation", self.alpha, "emitted")
        return Declaration(
            1, 0.0, budget, between=True, at_least_speculative=True, support=self.support
        )

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return αp_n + (1−α)q_n; the residual is (h − p)₊ ∝ (q − p)₊."""
        mixed = self.alpha * p_n + (1 - self.alpha) * q_n
        return mixed if self.support == "free" else torch.where(q_n > 0, mixed, 0.0)
