"""Confidence levels; tests of whether two methods differ on the same items, and sample sizes."""

import math
from collections.abc import Sequence

# fewest texts whose standard errors mean anything
FEWEST_TEXTS = 5
# joint confidence level of all intervals of ``expect``: one table in a hundred has a wrong interval
EXPECTED = 0.99
# probability of no alarm on a healthy engine, over all tests of a comparison together
QUIET = 0.98
# probability that the bound of ``promise`` from readings is wrong
RISK = 0.05
# standard normal quantiles: two-sided 95 %, and one-sided four in five
WIDE, POWER = 1.96, 0.8416


def mcnemar(better: int, worse: int) -> float:
    """Return McNemar's exact two-sided p-value, from items that only one of two methods gets right.

    ``better`` and ``worse`` count the items that only the first or only the second method gets
    right. If neither method is better, each of these items is in ``better`` with probability one
    half.
    """
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's correction.

    If no two methods differ, some corrected p is below 5 % with a probability of at most 5 %.
    """
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted


def items_needed(difference: float, error: float, count: int) -> int | None:
    """Return how many items a run needs to find a difference with probability 80 %, tested at 95 %.

    None if the difference is 0 or unknown.

    Parameters
    ----------
    difference : the effect, measured from the value that means no effect.
    error : the standard error of ``difference`` over ``count`` items; it falls as 1/√count.
    """
    if not math.isfinite(error) or not math.isfinite(difference) or difference == 0:
        return None
    return max(FEWEST_TEXTS, math.ceil(count * ((WIDE + POWER) * error / difference) ** 2))
