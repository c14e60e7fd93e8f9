"""A divergence in one file, as CONTRIBUTING.md describes it."""

from dataclasses import dataclass

import cactus_theory as ct
from cactus_theory.divergences import FDivergence


@ct.register_divergence
@dataclass(frozen=True)
class LeCam(FDivergence):
    """Le Cam's divergence: f = (t − 1)²/(2t + 2)."""

    name = "le_cam"
    at_zero, slope_at_infinity = 0.5, 0.5  # f(0) and f′(∞); f′(1) is 0, the default

    def f(self, t):
        return (t - 1) / 2 * ((t - 1) / (t + 1))  # a square would overflow

    def slope(self, t):
        return 0.5 - 2 / (t + 1) ** 2

    def slope_inverse(self, y):
        return (2 / (0.5 - y)).sqrt() - 1
