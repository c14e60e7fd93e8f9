r"""Write D(h‖q) ≤ δ for a conic solver, in variables that are all of order one.

The row is :math:`h = s ∘ w` on the tokens with q > 0, plus a total mass z on the tokens
with q = 0 (identically 0 unless the program allows it and f′(∞) < ∞). Solvers see w, whose
entries are near one when s is near h; in plain h a vocabulary of a thousand tokens fails.
With c = s/q the left-hand sides are :math:`Σ q f(c w) + f'(∞) z`, written with the atoms
that cvxpy knows. The forms follow from the generators in :mod:`cactus_theory.divergences`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory.divergences import Divergence, FDivergence, MaxDivergence, Renyi

# Exponents a with at most this denominator become a few second-order cones per token.
LARGEST_DENOMINATOR = 64
# e^x overflows float64 from 709.8; a budget beyond it binds nowhere.
LARGEST_EXPONENT = 700.0


def cvxpy() -> Any:
    """Return the cvxpy module, or say which extra brings it."""
    return check.optional_module("cvxpy", "solvers")


@dataclass(frozen=True)
class Scaled:
    """The row of a program: h = s∘w where q > 0, z in total where q = 0; all float64 (m,)."""

    q: np.ndarray
    s: np.ndarray
    w: Any
    z: Any = 0.0

    @property
    def h(self) -> Any:
        """Return h where q > 0, as a cvxpy expression."""
        return _times(self.s, self.w)

    @property
    def total(self) -> Any:
        """Return Σh over the whole vocabulary."""
        return self.s @ self.w + self.z


def _times(left: np.ndarray, right: Any) -> Any:
    return cvxpy().multiply(left, right)


def _kl(row: Scaled, f: FDivergence) -> Any:
    return (row.s * np.log(row.s / row.q)) @ row.w - row.s @ cvxpy().entr(row.w)


def _reverse_kl(row: Scaled, f: FDivergence) -> Any:
    return -(row.q @ cvxpy().log(row.w)) - row.q @ np.log(row.s / row.q)


def _total_variation(row: Scaled, f: FDivergence) -> Any:
    return cvxpy().sum(cvxpy().abs(row.h - row.q)) / 2


def _pearson_chi2(row: Scaled, f: FDivergence) -> Any:
    root = np.sqrt(row.q)
    return cvxpy().sum_squares(_times(row.s / root, row.w) - root)


def _neyman_chi2(row: Scaled, f: FDivergence) -> Any:
    inverse = cvxpy().inv_pos(row.w)
    return row.s @ row.w - 2 * row.q.sum() + (row.q**2 / row.s) @ inverse


def _squared_hellinger(row: Scaled, f: FDivergence) -> Any:
    overlap = np.sqrt(row.q * row.s) @ cvxpy().sqrt(row.w)
    return row.s @ row.w + row.q.sum() - 2 * overlap


def _jensen_shannon(row: Scaled, f: FDivergence) -> Any:
    # ½Σ[rel_entr(h, m) + rel_entr(q, m)], m = (h + q)/2; rel_entr is homogeneous, so its
    # arguments are divided by s and by q
    mine = cvxpy().rel_entr(row.w, (row.w + row.q / row.s) / 2)
    theirs = cvxpy().log((_times(row.s / row.q, row.w) + 1) / 2)
    return (row.s @ mine - row.q @ theirs) / 2


def _power(w: Any, a: float) -> Any:
    """Return w^a: second-order cones for simple fractions, else power cones.

    cvxpy would round other exponents to a fraction, which moves D by 1e-6.
    """
    if Fraction(a).limit_denominator(LARGEST_DENOMINATOR) == Fraction(a):
        return cvxpy().power(w, a)
    return cvxpy().power(w, a, approx=False)


def _power_weights(row: Scaled, a: float) -> np.ndarray:
    """Return q^{1−a} s^a, the weights of the power sum Σ h^a q^{1−a}."""
    return row.q * (row.s / row.q) ** a


def _alpha(row: Scaled, f: Any) -> Any:
    a, gain = f.a, 1 / (f.a * (f.a - 1))
    powers = (gain * _power_weights(row, a)) @ _power(row.w, a)
    return powers + gain * ((a - 1) * row.q.sum() - a * (row.s @ row.w))


_LEFT_SIDES = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "total_variation": _total_variation,
    "pearson_chi2": _pearson_chi2,
    "neyman_chi2": _neyman_chi2,
    "squared_hellinger": _squared_hellinger,
    "jensen_shannon": _jensen_shannon,
    "alpha": _alpha,
}


def left_side(row: Scaled, kind: FDivergence) -> Any:
    """Return Σ q f(h/q) over the tokens with q > 0, a convex expression."""
    return _LEFT_SIDES[kind.name](row, kind)


@dataclass(frozen=True)
class Budget:
    """D(h‖q) ≤ δ as constraints, and how their dual values read.

    A bound on ``Σ q f(h/q)`` with multiplier λ and ``Σh = 1`` with multiplier μ determine the
    Lagrange dual. The constraint may be another form of it: λ is ``multiplier`` times its
    dual value, and μ gains ``tilt`` times λ because the forms differ by a multiple of Σh.
    """

    constraints: list[Any]
    delta: float
    weight: np.ndarray | float = 1.0
    multiplier: float = 1.0
    tilt: float = 0.0

    @property
    def price(self) -> float:
        """Return the optimum's derivative in δ, read off the constraint's dual values."""
        if not self.constraints:
            return 0.0
        dual = self.constraints[0].dual_value
        return max(0.0, float(np.sum(np.asarray(dual) * self.weight)))

    @property
    def slope(self) -> float:
        """Return λ, the multiplier of Σ q f(h/q) ≤ its own budget."""
        if not self.constraints or isinstance(self.weight, np.ndarray):
            return 0.0
        return max(0.0, float(np.sum(self.constraints[0].dual_value))) * self.multiplier

    def level(self, total: Any) -> float:
        """Return μ, given the constraint Σh = 1."""
        return float(np.sum(total.dual_value)) + self.tilt * self.slope


def _renyi_budget(row: Scaled, kind: Renyi, delta: float) -> Budget:
    r"""Return the power-sum form Σ h^a q^{1−a} ≤ R (a > 1) or ≥ R (a < 1), R = e^{(a−1)δ}.

    For a > 1 both sides are divided by R. Mass z on q = 0 appears in no term of the sum.
    """
    a = kind.a
    right = math.exp(min((a - 1) * delta, LARGEST_EXPONENT))
    unit = max(right, 1.0)
    powers = (_power_weights(row, a) / unit) @ _power(row.w, a)
    return Budget(
        [powers <= right / unit if a > 1 else powers >= right / unit],
        delta,
        weight=abs(a - 1) * right / unit,
        multiplier=abs(a * (a - 1)) / unit,
        tilt=1 / (a - 1),
    )


def budget(row: Scaled, kind: Divergence, delta: float) -> Budget:
    """Return D(h‖q) ≤ ``delta`` as cvxpy constraints; none at all for an infinite budget."""
    if math.isinf(delta):
        return Budget([], delta)
    if isinstance(kind, MaxDivergence):
        most = math.exp(min(delta, LARGEST_EXPONENT)) * row.q
        return Budget([row.w <= most / row.s], delta, weight=most / row.s)
    if isinstance(kind, Renyi):
        return _renyi_budget(row, kind, delta)
    assert isinstance(kind, FDivergence)
    left = left_side(row, kind)
    if isinstance(row.z, float):
        return Budget([left <= delta], delta)
    return Budget([left + kind.slope_at_infinity * row.z <= delta], delta)


def is_linear(kind: Divergence) -> bool:
    """Return whether the budget is linear, so that a simplex method solves it exactly."""
    return kind.name in ("total_variation", "max_divergence")
