"""Check the arguments of the programs: one row each, a known divergence, a budget."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences import divergence as find_divergence


def one_pair(target_probs: Any, draft_probs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a target and a draft row (V,) as float64 numpy, divided by their sums."""
    target, draft = check.probability_rows(target_probs, draft_probs)
    if target.ndim != 1:
        raise ValueError(f"target_probs: must be one row (V,); got {check.describe(target)}")
    return target.cpu().numpy().copy(), draft.cpu().numpy().copy()


def budget(divergence: str | Divergence, delta: Any) -> tuple[Divergence, float]:
    """Return the divergence and its budget δ ≥ 0, possibly infinite."""
    return find_divergence(divergence), check.number("delta", delta, 0.0, math.inf)


def additive(divergence: str | Divergence, where: str = "to be summed") -> FDivergence:
    """Return an f-divergence, whose values may be summed over rows."""
    asked = find_divergence(divergence)
    if asked.generator is None or not asked.additive:
        raise ValueError(f"divergence: must be an f-divergence {where}; got {asked.spec!r}")
    return asked.generator


def halved(low: Any, high: Any, below: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    """Return brackets, arrays or tensors, after halvings; ``below``: the root is above x."""
    where = torch.where if isinstance(low, Tensor) else np.where
    for _ in range(steps):
        middle = (low + high) / 2
        under = below(middle)
        low, high = where(under, middle, low), where(under, high, middle)
    return low, high


def token_index(token: Any, vocabulary: int) -> int:
    """Return ``token`` as an index into the vocabulary."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise TypeError(f"token: must be an integer; got {token!r}")
    if not 0 <= token < vocabulary:
        raise ValueError(f"token: must lie in [0, {vocabulary - 1}]; got {token}")
    return int(token)


def lossless_price(q: np.ndarray, p: np.ndarray, kind: Divergence, free: bool = False) -> float:
    """Return the slope of the best Σ min(p, h) at δ = 0, where h = q; 0 if nothing is gained.

    Where p > q > 0 the first bit of divergence has an infinite price, as f is flat at 1. Mass
    on tokens with q = 0, if ``free``, costs f′(∞) − f′(1) each.
    """
    raised = (p > q) & (q > 0)
    one, zero = torch.tensor([1.0, 0.0], dtype=torch.float64)
    f = kind.generator
    if f is None:
        return float(kind.ceiling_slope(one)) * float(q[raised].sum())
    if raised.any():
        return 1 / f.kink if f.kink else math.inf
    if not (free and (p[q == 0] > 0).any()):
        return 0.0
    # mass taken away where h < q has the left slope at 1, half a kink below slope_at_one
    price = one / (f.slope_at_infinity - f.slope_at_one + f.kink / 2)
    return float(kind.price_from_generator(price, zero))
