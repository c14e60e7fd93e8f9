r"""Bound both programs from above by Lagrange duality, at any multipliers.

.. math:: \max_h Σ_i \min(c_i, h_i) \;\text{ s.t. }\; Σ h = 1,\; Σ_{q>0} q f(h/q) + f'(∞) z \le δ

has, for every λ ≥ 0 and every μ, the upper bound

.. math:: λδ + μ + Σ_i \sup_{0 \le h \le 1} [\min(c_i, h) − λ q_i f(h/q_i) − μ h]

where c is the draft row for the optimal program and a one-hot row for the per-proposal one.
Each supremum is closed: h/q = clip(c/q, f′⁻¹(−μ/λ), f′⁻¹((1−μ)/λ)). The multipliers come
from a solver, so that a small difference between bound and value proves the solver right;
no band, no sort and no root is involved. Source: Boyd & Vandenberghe 2004, 5.1 and 5.2.
"""

import math

import numpy as np
import torch

from cactus_theory.divergences import Divergence, FDivergence

from ._conic import generator_budget, most_of

# below this 1/λ may overflow; λ = 0 then gives a bound as well
SMALLEST_SLOPE = 1e-150


def _inverse_slope(f: FDivergence, y: float) -> float:
    """Return the ratio where f′ reaches y: 0 below its range, ∞ above it."""
    return float(f.ratio_at(torch.tensor(y, dtype=torch.float64)))


def _costs(f: FDivergence, q: np.ndarray, h: np.ndarray, slope: float) -> np.ndarray:
    """Return λ q f(h/q); 0 at λ = 0 even where f is infinite."""
    if slope == 0:
        return np.zeros_like(h)
    return slope * q * f.f(torch.from_numpy(h / q)).numpy()


def _best_of(
    rows: list[np.ndarray], f: FDivergence, q: np.ndarray, cap: np.ndarray, slope: float, mu: float
) -> float:
    """Return Σ_i of the best of a few candidate h_i (their Lagrangian terms)."""
    terms = [np.minimum(cap, h) - _costs(f, q, h, slope) - mu * h for h in rows]
    return float(np.max(terms, axis=0).sum())


def _inside(f: FDivergence, q: np.ndarray, cap: np.ndarray, slope: float, mu: float) -> float:
    """Return the sum of the suprema over tokens with q > 0."""
    if slope == 0 or not f.smooth:  # piecewise linear: the best is at a kink
        kinks = [np.zeros_like(q), np.minimum(cap, 1.0), q, np.ones_like(q)]
        return _best_of(kinks, f, q, cap, slope, mu)
    lower = _inverse_slope(f, -mu / slope)
    upper = _inverse_slope(f, (1 - mu) / slope)
    best = np.clip(cap / q, lower, max(lower, upper))
    return _best_of([np.minimum(best * q, 1.0)], f, q, cap, slope, mu)


def _outside(f: FDivergence, cap: float, slope: float, mu: float) -> float:
    """Return the supremum over the mass z on tokens with q = 0."""
    cost = mu + (slope * f.slope_at_infinity if slope else 0.0)
    if math.isinf(cost):
        return 0.0
    return max(min(cap, z) - cost * z for z in (0.0, cap, 1.0))


def lagrange_bound(
    kind: Divergence,
    q: np.ndarray,
    cap: np.ndarray,
    delta: float,
    multipliers: tuple[float, float],
    zero_cap: float | None = None,
) -> float:
    """Return a proven upper bound on the program's value.

    Parameters
    ----------
    kind : the divergence; its budget is read as that of its generator.
    q, cap : (m,) target and reward caps c on the tokens with q > 0.
    delta : budget, possibly infinite (then λ must be 0).
    multipliers : (λ, μ) of Σ q f(h/q) ≤ its budget and of Σh = 1.
    zero_cap : Σc over tokens with q = 0 if mass may go there, else None.
    """
    slope, mu = multipliers
    generator = kind.generator
    if generator is None:
        return _ceiling_bound(q, cap, most_of(kind, delta), mu)
    amount = generator_budget(kind, delta)
    if not math.isfinite(amount) or slope < SMALLEST_SLOPE:
        slope = 0.0  # an overflowing budget binds nowhere
    spend = slope * amount if slope else 0.0
    bound = spend + mu + _inside(generator, q, cap, slope, mu)
    return bound if zero_cap is None else bound + _outside(generator, zero_cap, slope, mu)


def _ceiling_bound(q: np.ndarray, cap: np.ndarray, ratio: float, mu: float) -> float:
    """Return μ + Σ sup over 0 ≤ h ≤ min(1, ratio·q), attained at an end or at c."""
    most = np.minimum(1.0, ratio * q)
    kinks = [np.zeros_like(q), np.minimum(cap, most), most]
    return mu + float(np.max([np.minimum(cap, h) - mu * h for h in kinks], axis=0).sum())
