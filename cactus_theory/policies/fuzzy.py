"""Emit from the draft where the two rows are close."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import ungraphed
from cactus_theory.divergences.definition import registered_divergence as find_divergence
from cactus_theory.optimum.charges import divergences_of
from cactus_theory.policies._base_classes import Either
from cactus_theory.policies._decisions import SUPPORTS, Budget, Declaration, Support
from cactus_theory.policies._policy import Rows
from cactus_theory.policies._registry import register


@register("fuzzy")
@dataclass(frozen=True)
class Fuzzy(Either):
    r"""Lossless sampling on :math:`h = p` where :math:`D(p\|q) < T`, else on :math:`h = q`.

    A row just beyond T gains nothing. Tokens that the target excludes are refused; with
    ``support="free"``, as published, they are emitted where the divergence is finite. This is
    the recursive variant: beyond T it is lossless sampling. The variant called exact draws from
    q without a test there; it emits the same law and accepts less. Source: Holsman et al. 2025
    (Fuzzy Speculative Decoding, arXiv 2502.20704).
    """

    threshold: float
    divergence: str = "jensen_shannon"
    support: Support = "target"
    knob = "threshold"

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", check.number("threshold", self.threshold, 0))
        object.__setattr__(self, "divergence", find_divergence(self.divergence).spec)
        check.one_of("support", self.support, SUPPORTS)

    @property
    def declares(self) -> Declaration:
        """Return: the emitted divergence within T."""
        budget = Budget(self.divergence, self.threshold, "emitted")
        return Declaration(
            1,
            0.0,
            budget,
            True,
            at_least_speculative=True,
            continuous=False,
            support=self.support,
        )

    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return whether the rows are close."""
        p, q = (ungraphed(rows) for rows in (p, q))
        return divergences_of(find_divergence(self.divergence), p, q) < self.threshold
