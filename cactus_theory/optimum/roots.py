"""One guarded Newton iteration for convex functions, on many rows at once."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Values = Float[Tensor, "*rows"]
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]

# Bisection alone needs 53 halvings to exhaust float64 on [0, 1] and some more near 0.
MOST_STEPS = 140
# The function is a sum of many rounded terms: closer to the budget than this, on either side,
# is equal to it.
BUDGET_ULPS = 4e-16


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
