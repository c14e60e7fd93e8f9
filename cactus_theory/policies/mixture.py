"""Verify against a mixture of the two models."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies._base import Rows
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._entrywise import Raised
from cactus_theory.policies._registry import register


@register("mixture")
@dataclass(frozen=True)
class Mixture(Raised):
    r"""Lossless sampling on :math:`h = αp + (1−α)q`.

    TV(h, q) = α TV(p, q), and no policy within that much total variation accepts more:
    A = 1 − (1−α) TV(p, q). Emits tokens that the target excludes. Hugging Face's
    ``assistant_ensemble_weight`` is 1 − α. Source: the interpolation baseline of
    Hao & Mou 2026 (arXiv 2604.04987).
    """

    alpha: float
    knob = "alpha"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", check.number("alpha", self.alpha, 0, 1))

    @property
    def declares(self) -> Declaration:
        """Return: the emitted total variation within α; any token of the draft may appear."""
        budget = Budget("total_variation", self.alpha, "emitted")
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True, support="free")

    def ceiling(
        self, q_n: Float[Tensor, "*any"], p_n: Float[Tensor, "*any"]
    ) -> Float[Tensor, "*any"]:
        """Return αp_n + (1−α)q_n; the residual is (h − p)₊ ∝ (q − p)₊."""
        return self.alpha * p_n + (1 - self.alpha) * q_n

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return αp + (1−α)q."""
        return self.alpha * p + (1 - self.alpha) * q
