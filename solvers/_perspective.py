r"""P f(c w/P) as cvxpy writes it, one form for each generator class.

A block's program pays :math:`Σ q P f(g/(qP))` at every node, P being a variable too: the
perspective of :math:`q f`, jointly convex. With g = s∘w and c = s/q each token's term is
q times the P f(c w/P) below, in arrays over all tokens of all nodes at once.
"""

from dataclasses import dataclass, field
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
from ._scaled import cvxpy, times


@dataclass
class Terms:
    """P f(c w/P) of many tokens: w and P are cvxpy expressions (m,), c an array (m,).

    ``constraints`` collects what forms with variables of their own need.
    """

    w: Any
    alive: Any
    c: np.ndarray
    constraints: list[Any] = field(default_factory=list)

    @property
    def given(self) -> Any:
        """Return c w, which is g/q."""
        return times(self.c, self.w)

    def variable(self) -> Any:
        """Return a new variable (m,)."""
        return cvxpy().Variable(self.c.shape)

    def square_over(self, top: Any, bottom: Any) -> Any:
        """Return something that is at least top²/bottom, and reaches it."""
        bound = self.variable()
        lower = cvxpy().vstack([2 * top, bound - bottom])
        self.constraints.append(cvxpy().SOC(bound + bottom, lower, axis=0))
        return bound

    def power(self, a: float) -> Any:
        """Return something on the convex or concave side of w^a P^(1−a), and that reaches it."""
        bound, one, cone = self.variable(), np.ones(self.c.shape), cvxpy().PowCone3D
        if 0 < a < 1:
            held = cone(self.w, self.alive, bound, a * one)
        elif a > 1:
            held = cone(bound, self.alive, self.w, one / a)
        else:
            held = cone(bound, self.w, self.alive, one / (1 - a))
        self.constraints.append(held)
        return bound


_FORMS = Forms("perspective_of", "solvers/_perspective.py")
perspective_of = _FORMS.enter


def perspective(terms: Terms, kind: FDivergence) -> Any:
    """Return P f(c w/P) of every token (m,), convex; see ``terms.constraints`` too.

    Raises
    ------
    ValueError
        No form is known for this divergence.
    """
    return _FORMS.form(kind)(terms, kind)


@perspective_of(KL)
def _kl(terms: Terms, f: FDivergence) -> Any:
    relative = cvxpy().rel_entr(terms.w, terms.alive)
    return times(terms.c, relative) + times(terms.c * np.log(terms.c), terms.w)


@perspective_of(ReverseKL)
def _reverse_kl(terms: Terms, f: FDivergence) -> Any:
    return cvxpy().rel_entr(terms.alive, terms.w) - times(np.log(terms.c), terms.alive)


@perspective_of(TotalVariation)
def _total_variation(terms: Terms, f: FDivergence) -> Any:
    return cvxpy().abs(terms.given - terms.alive) / 2


@perspective_of(PearsonChi2)
def _pearson_chi2(terms: Terms, f: FDivergence) -> Any:
    # (c w − P)²/P written out: where c is large its square would swamp the cone
    over = terms.square_over(terms.w, terms.alive)
    return times(terms.c**2, over) - 2 * terms.given + terms.alive


@perspective_of(NeymanChi2)
def _neyman_chi2(terms: Terms, f: FDivergence) -> Any:
    over = terms.square_over(terms.alive, terms.w)
    return terms.given - 2 * terms.alive + times(1 / terms.c, over)


@perspective_of(SquaredHellinger)
def _squared_hellinger(terms: Terms, f: FDivergence) -> Any:
    root = terms.variable()  # at most √(w P)
    lower = cvxpy().vstack([2 * root, terms.w - terms.alive])
    terms.constraints.append(cvxpy().SOC(terms.w + terms.alive, lower, axis=0))
    return terms.given + terms.alive - times(2 * np.sqrt(terms.c), root)


@perspective_of(JensenShannon)
def _jensen_shannon(terms: Terms, f: FDivergence) -> Any:
    # ½[rel_entr(c w, m) + rel_entr(P, m)], m = (c w + P)/2, with all arguments of order one
    cp, c = cvxpy(), terms.c
    middle = times(c / (1 + c), terms.w) + times(1 / (1 + c), terms.alive)
    mine = cp.rel_entr(terms.w, middle) + times(np.log(2 * c / (1 + c)), terms.w)
    theirs = cp.rel_entr(terms.alive, middle) - times(np.log((1 + c) / 2), terms.alive)
    return (times(c, mine) + theirs) / 2


@perspective_of(Alpha)
def _alpha(terms: Terms, f: Any) -> Any:
    a = f.a
    whole = times(terms.c**a, terms.power(a)) - a * terms.given + (a - 1) * terms.alive
    return whole / (a * (a - 1))
