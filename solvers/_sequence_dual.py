r"""The sequence program by its Lagrange dual, at any size: two nested roots and no solver.

.. math:: \min_{λ \ge 0, μ} λΔ + Σ_t \Big( μ_t + Σ_i \sup_h
   [\min(p_{ti}, h) − λ q_{ti} f(h/q_{ti}) − μ_t h] \Big)

Each supremum is at h = q clip(p/q, a, b) with f′(a) = −μ/λ and f′(b) = (1 − μ)/λ. So μ_t is the
root of Σ h = 1, which rises in a, and λ that of Σ D = Δ, which falls in λ. The rows found are
feasible and their value meets the bound of :mod:`solvers._dual`, which proves them.
"""

import math

import numpy as np
import torch
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.divergences import FDivergence

# a is searched for in [e^−700, 1]: so many halvings leave its relative error at rounding
LOWEST_LOG, HALVINGS = -700.0, 64
# ln λ is searched for between these: every row is then at one of its ends, up to rounding
PRICES = (-40.0, 40.0)
# of ln λ; the value is flat there, to second order
PRICE_ACCURACY = 1e-13


def solve(
    q: np.ndarray, p: np.ndarray, f: FDivergence, delta: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return rows (T, V), the price λ and levels μ (T,), for rows q, p (T, V) and 0 < Δ < ∞."""
    optimize = check.optional_module("scipy.optimize", "solvers")
    target, draft = torch.from_numpy(q), torch.from_numpy(p)

    seen: dict[float, float] = {}

    def over(log_price: float) -> float:
        rows, _ = _rows(target, draft, f, math.exp(log_price))
        seen[log_price] = float(f.value(rows, target).sum()) - delta
        return seen[log_price]

    if over(PRICES[0]) <= 0:
        rows, _ = _rows(target, draft, f, math.exp(PRICES[0]))
        return rows.numpy(), 0.0, np.zeros(len(q))
    optimize.brentq(over, *PRICES, xtol=PRICE_ACCURACY)
    # of the two ends of the last bracket the one within the budget: at a tiny price a row's
    # last digit is worth much divergence, and the other end may spend 1e-9 too much
    price = math.exp(max((value, log) for log, value in seen.items() if value <= 0)[1])
    rows, levels = _rows(target, draft, f, price)
    return rows.numpy(), price, levels.numpy()


def _rows(q: Tensor, p: Tensor, f: FDivergence, price: float) -> tuple[Tensor, Tensor]:
    """Return h (T, V) with Σ h = 1, and μ (T,), at a price."""
    inside = q > 0
    ratio = torch.where(inside, p / torch.where(inside, q, 1.0), 0.0)
    low = torch.full_like(q[:, :1], LOWEST_LOG)
    high = torch.zeros_like(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = (q * _clipped(ratio, middle.exp(), f, price)).sum(-1, keepdim=True) < 1
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    edge = high.exp()
    rows = q * _clipped(ratio, edge, f, price)
    return rows / rows.sum(-1, keepdim=True), -price * f.slope(edge[:, 0])


def _clipped(ratio: Tensor, lower: Tensor, f: FDivergence, price: float) -> Tensor:
    upper = f.ratio_at(f.slope(lower) + 1 / price)
    return torch.minimum(torch.maximum(ratio, lower), upper)
