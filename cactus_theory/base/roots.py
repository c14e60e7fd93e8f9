"""Find roots in brackets: of a rising function of one number, of convex functions of many rows."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.tolerances import LEAST

Values = Float[Tensor, "*rows"]
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]

# Most steps of a search. Bisection alone needs 53 halvings to exhaust float64 on [0, 1], some more
# near 0, and 60 of ln x; a secant takes about five steps.
MOST_STEPS = 140
# A secant search ends if its step times the step before is at most this share of the settled width
SECOND = 1 / 200
# largest secant step, in ln x
FARTHEST = 50.0
# Relative distance from the budget that counts as equal to the budget: the function is a sum of
# many rounded terms.
BUDGET_ULPS = 4e-16


def rising_root(
    rising: Callable[[float], float],
    low: float,
    high: float,
    start: float,
    settled: float,
    steepness: float,
) -> float:
    """Return the root of a rising function of x > 0 in the bracket from ``low`` to ``high``.

    Each step is a secant step in ln x. A step that leaves the bracket, or follows two steps that
    did not halve the value, goes to the bracket's geometric middle instead.
    Every value narrows the bracket, so the root stays inside. The search ends with a step of at
    most ``settled``, relative to x. ``steepness`` is a guess of x times the derivative, for the
    first step; with ∞ the first step halves the bracket instead.
    """
    x, before, slow = min(max(start, low), high), None, False
    for _ in range(MOST_STEPS if low < high else 0):
        value = rising(x)
        if value == 0:
            break
        low, high = (low, x) if value > 0 else (x, high)
        guess, last_step, halve = 0.0, math.inf, False  # a guess of 0 is outside the bracket
        if before is not None and math.isfinite(before[1]):
            last_step = abs(x - before[0]) / x
            steepness = (value - before[1]) / math.log(x / before[0])
            not_halved = abs(value) > abs(before[1]) / 2
            halve, slow = not_halved and slow, not_halved and not slow
        if not halve and abs(value) < FARTHEST * steepness:
            guess = x * math.exp(-value / steepness)
        within = low < guess < high
        following = guess if within else math.sqrt(low) * math.sqrt(high)
        step = abs(following - x) / x
        before, x = (x, value), following
        # the error left by a secant step is of the order of its product with the step before
        if step <= settled or (within and step * last_step <= settled * SECOND):
            break
    return x


def convex_root(evaluate: Evaluate, over: Values, under: Values, budget: Values) -> Values:
    """Return x between ``over`` and ``under`` at which a convex function equals ``budget``.

    ``evaluate`` returns value and derivative. For a function that only rises or falls the
    derivative may be NaN. The value must exceed the budget at ``over`` and not at ``under``; if the
    value at ``over`` does not exceed the budget either, ``over`` is returned.

    A Newton step from the side above the budget never overshoots a convex function. Every third
    step halves the bracket instead, so that a flat or infinite slope at the start costs little, and
    every second such step halves the bracket in logarithms, so that a root of 1e-150 is found. A
    value of NaN, as for a ratio beyond float64, counts as above the budget. The value at the
    result exceeds the budget by at most a rounding error, ``BUDGET_ULPS`` · (1 + budget).
    """
    close = BUDGET_ULPS * (1 + budget)
    value, slope = evaluate(over)
    active = ~(value <= budget + close)
    for step in range(MOST_STEPS):
        newton = over + (budget - value) / slope
        middle = (over + under) / 2
        if step % 6 == 5:
            geometric = over.clamp(min=LEAST).sqrt() * under.clamp(min=LEAST).sqrt()
            middle = torch.where(_between(geometric, over, under), geometric, middle)
        usable = torch.isfinite(newton) & _between(newton, over, under)
        trial = middle if step % 3 == 2 else torch.where(usable, newton, middle)
        active = active & _between(trial, over, under)
        if not bool(active.any()):
            break
        trial_value, trial_slope = evaluate(trial)
        kept = trial_value <= budget  # False for NaN
        under = torch.where(active & kept, trial, under)
        advance = active & ~kept
        over = torch.where(advance, trial, over)
        value = torch.where(advance, trial_value, value)
        slope = torch.where(advance, trial_slope, slope)
        active = active & ~(value <= budget + close) & ~(kept & (trial_value >= budget - close))
    return torch.where(value <= budget + close, over, under)


def _between(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return (x > torch.minimum(one, other)) & (x < torch.maximum(one, other))
