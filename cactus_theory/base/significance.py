"""Confidence levels; whether two ways differ on the same items, and how many items it takes."""

import math
from collections.abc import Sequence

# fewest texts whose errors say anything
FEWEST_TEXTS = 5
# joint confidence level of all intervals of expect: one table in a hundred is wrong somewhere
EXPECTED = 0.99
# probability of no alarm on a healthy engine, all tests of a comparison together
QUIET = 0.98
# risk that the bound of promise from readings is wrong
RISK = 0.05
# standard normal quantiles of two sides of 95 %, and of four in five
WIDE, POWER = 1.96, 0.8416


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p of items on which one of two ways alone is right.

    If neither way is better, each of these items falls to either with a probability of one half.
    """
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**count)


def holm(values: Sequence[float]) -> list[float]:
    """Return p of several tests, raised so that all below 5 % are right at 95 % together (Holm)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted


def items_needed(difference: float, error: float, count: int) -> int | None:
    """Return how many items make a difference significant: at 95 %, in four of five such runs.

    Parameters
    ----------
    difference, error : from what there is without one, and its standard error over ``count`` items;
        the error falls with the root of their number. None where the difference is 0 or unknown.
    """
    if not math.isfinite(error) or not math.isfinite(difference) or difference == 0:
        return None
    return max(FEWEST_TEXTS, math.ceil(count * ((WIDE + POWER) * error / difference) ** 2))
