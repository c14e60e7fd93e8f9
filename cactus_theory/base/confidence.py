"""A lower bound on a mean that stays valid however often a growing log is read."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base.roots import rising_root

# rates λ of the supermartingales that a bound averages: large ones for few numbers, small for many
RATES = 0.95 * 2.0 ** -np.arange(10)
PENALTIES = -np.log1p(-RATES) - RATES
# relative step at which a search for a bound ends
SETTLED = 1e-13


def log_mean(logs: Float[np.ndarray, "*some M"]) -> Any:
    """Return ln of the mean of e^x over the last axis of numbers x; −∞ where all x are −∞."""
    top = np.maximum(logs.max(-1), -1e300)
    with np.errstate(divide="ignore"):
        return top + np.log(np.exp(logs - top[..., None]).mean(-1))


@dataclass
class LowerMean:
    r"""A lower bound on the mean of the numbers of a growing log, valid at all times at once.

    More exactly, the bound is on the average of the conditional means of each number, given the
    numbers before it. Numbers x must be at least −``below``. Each x is predicted by the mean x̂ of
    the numbers before it, cut off at ``most``. Divided by ``below + most``, x − x̂ is at least −1.
    So for 0 ≤ λ < 1 the product of :math:`e^{λ(x − μ) − (−\ln(1 − λ) − λ)(x − x̂)^2}` is a
    supermartingale, with μ the mean of x given the numbers before it (Fan, Grama & Liu 2015; Howard
    et al. 2021). The average of these products over several λ (``RATES``) is a supermartingale,
    too, and Ville's inequality turns it into the bound.

    Attributes
    ----------
    below, most, start : numbers are ≥ −below; ``most`` is the largest prediction; ``start`` is the
        first prediction, which later predictions count as one more number.
    count, total, squares : how many numbers were added, their sum, and Σ (x − x̂)².
    """

    below: float
    most: float
    start: float = 0.0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Float[np.ndarray, "n"]) -> None:
        """Add further numbers, in their order."""
        before = self.total + np.concatenate([[0.0], values.cumsum()])
        counts = self.count + np.arange(len(values))
        guesses = np.clip((before[:-1] + self.start) / (counts + 1), -self.below, self.most)
        self.squares += float(np.square((values - guesses) / (self.below + self.most)).sum())
        self.total, self.count = float(before[-1]), self.count + len(values)

    def bound(self, alpha: float) -> float:
        """Return the bound; all bounds of a growing log hold with probability 1 − ``alpha``."""
        if not self.count:
            return -self.below
        limit = -math.log(alpha)

        # ``excess`` is the sum of x − μ, in units of below + most, at which evidence reaches 1/α
        def above_limit(excess: float) -> float:
            return float(log_mean(RATES * excess - PENALTIES * self.squares)) - limit

        # at the high end one rate alone, with its share of the average, reaches the limit
        high = float(((PENALTIES * self.squares + limit + math.log(len(RATES))) / RATES).min())
        low = limit / float(RATES.max())  # below, no rate reaches the limit, penalties being ≥ 0
        excess = rising_root(above_limit, low, high, start=high, settled=SETTLED, steepness=limit)
        return (self.total - (self.below + self.most) * excess) / self.count
