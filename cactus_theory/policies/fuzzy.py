"""Take the draft's word where the two rows are close."""

from dataclasses import dataclass

import torch

from cactus_theory import _arguments as check
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies._base import FixedTarget, Rows
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._registry import register


@register("fuzzy")
@dataclass(frozen=True)
class Fuzzy(FixedTarget):
    r"""Lossless sampling on :math:`h = p` where :math:`D(p\|q) < T`, else on :math:`h = q`.

    All or nothing: a row just beyond T gains nothing. Emits tokens that the target excludes
    where the divergence is finite there. Source: Holsman et al. 2025 (Fuzzy Speculative
    Decoding, arXiv 2502.20704).
    """

    threshold: float
    divergence: str = "jensen_shannon"
    knob = "threshold"

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", check.number("threshold", self.threshold, 0))
        object.__setattr__(self, "divergence", find_divergence(self.divergence).spec)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted divergence within T."""
        budget = Budget(self.divergence, self.threshold, "emitted")
        return Declaration(
            1, 0.0, budget, True, at_least_speculative=True, continuous=False, support="free"
        )

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return p on close rows, else q."""
        apart = find_divergence(self.divergence).value(p.double(), q.double())
        return torch.where((apart < self.threshold)[..., None], p, q)
