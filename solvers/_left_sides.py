"""Σ q f(h/q) of a row: the table of :mod:`solvers._perspective` at P = 1."""

from collections.abc import Callable
from typing import Any

from cactus_theory.divergences import FDivergence, TotalVariation

from ._perspective import Terms, perspective
from ._scaled import Scaled, cvxpy

Form = Callable[[Scaled, Any], Any]
_FORMS: dict[type[FDivergence], Form] = {}


def left_side_of(kind: type[FDivergence]) -> Callable[[Form], Form]:
    """Register a function of (row, divergence) as the sum of a class, in place of the table's."""

    def entered(form: Form) -> Form:
        _FORMS[kind] = form
        return form

    return entered


def left_side(row: Scaled, kind: FDivergence) -> Any:
    """Return Σ q f(h/q) over the tokens with q > 0, a convex expression.

    Raises
    ------
    ValueError
        No form is known for this divergence.
    """
    if type(kind) in _FORMS:
        return _FORMS[type(kind)](row, kind)
    return row.q @ perspective(Terms(row.w, 1, row.s / row.q), kind)


@left_side_of(TotalVariation)
def _total_variation(row: Scaled, f: FDivergence) -> Any:
    # the table's, in units of h: they decide at which of many optimal rows a simplex method ends
    return cvxpy().sum(cvxpy().abs(row.h - row.q)) / 2
