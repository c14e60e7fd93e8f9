"""The divergence that bounds every token's ratio h/q."""

import torch
from torch import Tensor

from cactus_theory.divergences._base import Divergence
from cactus_theory.divergences._registry import register_divergence


@register_divergence
class MaxDivergence(Divergence):
    """ln max h/q, the Rényi divergence of infinite order: h ≤ e^δ q pointwise."""

    name = "max_divergence"
    concave_frontier = False
    linear = True
    generator = None  # type: ignore[assignment]

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        h, q = emitted.double(), target.double()
        ratio = torch.where(h == 0, 0.0, h / q)
        return ratio.amax(-1).log().clamp(min=0.0)

    def ceiling(self, delta: Tensor) -> Tensor:
        """Return e^δ."""
        return delta.exp()

    def from_ceiling(self, ratio: Tensor) -> Tensor:
        """Return the logarithm."""
        return ratio.log()

    def ceiling_slope(self, ratio: Tensor) -> Tensor:
        """Return the ratio itself, as e^δ is its own derivative."""
        return ratio
