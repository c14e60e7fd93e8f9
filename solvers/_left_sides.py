r"""Σ q f(h/q) as cvxpy writes it, one form for each generator class.

With h = s∘w and c = s/q the sum is Σ q f(c w), written with the atoms that cvxpy knows. The
forms follow from the generators in :mod:`cactus_theory.divergences`. A new divergence needs
one, here or in any imported file, registered by :func:`left_side_of`, before the solvers accept
it.
"""

from fractions import Fraction
from typing import Any

import numpy as np

from cactus_theory.divergences import (
    KL,
    Alpha,
    FDivergence,
    JensenShannon,
    NeymanChi2,
    PearsonChi2,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)

from ._forms import Forms
from ._scaled import Scaled, cvxpy, times

# Exponents a with at most this denominator become a few second-order cones per token.
LARGEST_DENOMINATOR = 64

_FORMS = Forms("left_side_of", "solvers/_left_sides.py")
left_side_of = _FORMS.enter


def left_side(row: Scaled, kind: FDivergence) -> Any:
    """Return Σ q f(h/q) over the tokens with q > 0, a convex expression.

    Raises
    ------
    ValueError
        No form is known for this divergence.
    """
    return _FORMS.form(kind)(row, kind)


@left_side_of(KL)
def _kl(row: Scaled, f: FDivergence) -> Any:
    return (row.s * np.log(row.s / row.q)) @ row.w - row.s @ cvxpy().entr(row.w)


@left_side_of(ReverseKL)
def _reverse_kl(row: Scaled, f: FDivergence) -> Any:
    return -(row.q @ cvxpy().log(row.w)) - row.q @ np.log(row.s / row.q)


@left_side_of(TotalVariation)
def _total_variation(row: Scaled, f: FDivergence) -> Any:
    return cvxpy().sum(cvxpy().abs(row.h - row.q)) / 2


@left_side_of(PearsonChi2)
def _pearson_chi2(row: Scaled, f: FDivergence) -> Any:
    root = np.sqrt(row.q)
    return cvxpy().sum_squares(times(row.s / root, row.w) - root)


@left_side_of(NeymanChi2)
def _neyman_chi2(row: Scaled, f: FDivergence) -> Any:
    inverse = cvxpy().inv_pos(row.w)
    return row.s @ row.w - 2 * row.q.sum() + (row.q**2 / row.s) @ inverse


@left_side_of(SquaredHellinger)
def _squared_hellinger(row: Scaled, f: FDivergence) -> Any:
    overlap = np.sqrt(row.q * row.s) @ cvxpy().sqrt(row.w)
    return row.s @ row.w + row.q.sum() - 2 * overlap


@left_side_of(JensenShannon)
def _jensen_shannon(row: Scaled, f: FDivergence) -> Any:
    # ½Σ[rel_entr(h, m) + rel_entr(q, m)], m = (h + q)/2; rel_entr is homogeneous, so its
    # arguments are divided by s and by q
    mine = cvxpy().rel_entr(row.w, (row.w + row.q / row.s) / 2)
    theirs = cvxpy().log((times(row.s / row.q, row.w) + 1) / 2)
    return (row.s @ mine - row.q @ theirs) / 2


def power(w: Any, a: float) -> Any:
    """Return w^a: second-order cones for simple fractions, else power cones.

    cvxpy would round other exponents to a fraction, which moves D by 1e-6.
    """
    if Fraction(a).limit_denominator(LARGEST_DENOMINATOR) == Fraction(a):
        return cvxpy().power(w, a)
    return cvxpy().power(w, a, approx=False)


def power_weights(row: Scaled, a: float) -> np.ndarray:
    """Return q^{1−a} s^a, the weights of the power sum Σ h^a q^{1−a}."""
    return row.q * (row.s / row.q) ** a


@left_side_of(Alpha)
def _alpha(row: Scaled, f: Any) -> Any:
    a, gain = f.a, 1 / (f.a * (f.a - 1))
    powers = (gain * power_weights(row, a)) @ power(row.w, a)
    return powers + gain * ((a - 1) * row.q.sum() - a * (row.s @ row.w))
