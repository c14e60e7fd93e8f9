"""Statistics of simulations: medians over repeats, intervals over resampled prompts, curves.

Jackknife errors come from :class:`cactus_theory.traces.estimate.Estimate`.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

# number of bootstrap resamples of prompts or texts, and the percentiles of an interval
RESAMPLES = 1000
INTERVAL = (5, 95)
Values = Float[np.ndarray, "count"]
Draws = Int[np.ndarray, "draws count"]


def resamples(count: int, seed: int | np.random.Generator = 0) -> Draws:
    """Draw RESAMPLES bootstrap samples of ``count`` items, as indices (RESAMPLES, count)."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def interval(values: Any) -> list[float]:
    return np.percentile(values, INTERVAL).tolist()


def spread(name: str, values: Values, drawn: Float[np.ndarray, "draws count"]) -> dict[str, float]:
    """Return the median over repeats as ``name``, and its interval as ``name_low``, ``name_high``.

    ``drawn`` has the value of each repeat for each resample of the prompts.
    """
    low, high = interval(np.median(drawn, axis=1))
    return {name: float(np.median(values)), f"{name}_low": low, f"{name}_high": high}


def hermite(at: float, x: Values, y: Values, slope: Values, slack: float = 0.0) -> float | None:
    """Return y at the point ``at``, by cubic Hermite interpolation; None outside the range of x.

    ``x`` rises, and ``slope`` is dy/dx at each ``x``. A point that is outside by at most ``slack``
    times the range of x counts as inside.
    """
    beyond = slack * (x[-1] - x[0]) if len(x) else 0.0
    if len(x) < 2 or not x[0] - beyond <= at <= x[-1] + beyond:
        return None
    i = min(max(int(np.searchsorted(x, at)), 1), len(x) - 1)
    width = x[i] - x[i - 1]
    t = (at - x[i - 1]) / width
    ends = (1 + 2 * t) * (1 - t) ** 2 * y[i - 1] + t**2 * (3 - 2 * t) * y[i]
    bends = t * (1 - t) ** 2 * slope[i - 1] - t**2 * (1 - t) * slope[i]
    return float(ends + width * bends)
