"""Roots in brackets: of a rising function, by halving, and of convex functions.

One number, which the caller evaluates, or many rows at once.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Values = Float[Tensor, "*rows"]
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]

# Bisection alone needs 53 halvings to exhaust float64 on [0, 1] and some more near 0, and 60 of
# ln x; a secant takes about five steps.
MOST_STEPS = 140
# of a secant step and the one before it, the product may be this share of what settles a root
SECOND = 1 / 200
# no guess is further away than a factor of e to this
FARTHEST = 50.0
# The function is a sum of many rounded terms: closer to the budget than this, on either side,
# is equal to it.
BUDGET_ULPS = 4e-16


class RisingRoot:
    """A search for the root of a rising function of x > 0, which the caller evaluates.

    By secants in ln x, or in x where the function is ``straight`` between its kinks; two steps in
    a row that did not halve the value are followed by half the bracket. ``steepness`` is a guess
    of x f′(x), for the first step; ∞ halves the bracket instead. ``x`` is where the function is to
    be evaluated next, the root once ``done``.
    """

    def __init__(
        self,
        low: float,
        high: float,
        start: float,
        settled: float,
        steepness: float = math.inf,
        straight: bool = False,
    ) -> None:
        self.low, self.high, self.settled, self.steepness = low, high, settled, steepness
        self.x = min(max(start, low), high)
        self.done = high <= low
        self.straight, self.slow = straight, False
        self.before: tuple[float, float] | None = None
        self.steps = 0

    def tell(self, value: float) -> None:
        """Use the value at ``x`` and choose the next ``x``."""
        x, before = self.x, self.before
        self.steps += 1
        if value == 0:
            self.done = True
            return
        if value > 0:
            self.high = x
        else:
            self.low = x
        guess, last, halve = 0.0, math.inf, False
        if before is not None and math.isfinite(before[1]):
            last = abs(x - before[0]) / x
            run = (x - before[0]) / x if self.straight else math.log(x / before[0])
            self.steepness = (value - before[1]) / run
            slow = abs(value) > abs(before[1]) / 2
            halve, self.slow = slow and self.slow, slow and not self.slow
        if not halve and abs(value) < FARTHEST * self.steepness:
            step = -value / self.steepness
            guess = x + x * step if self.straight else x * math.exp(step)
        within = self.low < guess < self.high
        following = guess if within else math.sqrt(self.low) * math.sqrt(self.high)
        step = abs(following - x) / x
        self.before, self.x = (x, value), following
        # what a secant step leaves is of the order of its product with the step before
        self.done = step <= self.settled or self.steps >= MOST_STEPS
        self.done = self.done or (within and step * last <= self.settled * SECOND)


def halved(
    low: Values, high: Values, below: Callable[[Tensor], Tensor], steps: int = MOST_STEPS
) -> tuple[Values, Values]:
    """Return the brackets after so many halvings; ``below`` says where the root is above x."""
    for _ in range(steps):
        middle = (low + high) / 2
        if not bool(_between(middle, low, high).any()):
            break
        under = below(middle)
        low, high = torch.where(under, middle, low), torch.where(under, high, middle)
    return low, high


def convex_root(evaluate: Evaluate, over: Values, under: Values, budget: Values) -> Values:
    """Return x between ``over`` and ``under`` where a convex function meets ``budget``.

    ``evaluate`` returns value and derivative. The value exceeds the budget at ``over`` and
    not at ``under``; where it does not exceed it at ``over`` either, ``over`` is returned.
    A Newton step from the side above the budget never overshoots a convex function; every
    third step halves the bracket, so that a flat or infinite slope at the start costs
    little. The result keeps the budget up to ``BUDGET_ULPS``·(1 + budget).
    """
    close = BUDGET_ULPS * (1 + budget)
    value, slope = evaluate(over)
    active = value > budget + close
    for step in range(MOST_STEPS):
        newton = over + (budget - value) / slope
        middle = (over + under) / 2
        usable = torch.isfinite(newton) & _between(newton, over, under)
        trial = middle if step % 3 == 2 else torch.where(usable, newton, middle)
        active = active & _between(trial, over, under)
        if not bool(active.any()):
            break
        there, steepness = evaluate(trial)
        kept = there <= budget
        under = torch.where(active & kept, trial, under)
        advance = active & ~kept
        over = torch.where(advance, trial, over)
        value = torch.where(advance, there, value)
        slope = torch.where(advance, steepness, slope)
        active = active & (value > budget + close) & ~(kept & (there >= budget - close))
    return torch.where(value <= budget + close, over, under)


def _between(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return (x > torch.minimum(one, other)) & (x < torch.maximum(one, other))
