r"""How cvxpy writes P f(c w/P), one form for each generator class: the table of all programs.

A row is h = s∘w on the tokens with q > 0, plus a total mass z on the tokens with q = 0 (identically
0 unless the program allows it and f′(∞) < ∞). Solvers see w, whose entries are near one when s is
near h; in plain h a vocabulary of a thousand tokens fails.

A block's program pays :math:`Σ q P f(g/(qP))` at every node, P being a variable too: the
perspective of :math:`q f`, jointly convex. With g = s∘w and c = s/q each token's term is
q times the P f(c w/P) below, in arrays over all tokens of all nodes at once. The other programs
have one row, and P = 1: there the same cones have one variable less, in cvxpy's own atoms.
The forms follow from the generators in :mod:`cactus_theory.divergences`. A new divergence needs
one, here or in any imported file, registered by :func:`perspective_of`, before the solvers accept
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences.classical import (
    KL,
    Alpha,
    JensenShannon,
    NeymanChi2,
    PearsonChi2,
    ReverseKL,
    SquaredHellinger,
    TotalVariation,
)

# Largest denominator of an exponent a that becomes a few second-order cones per token.
LARGEST_DENOMINATOR = 64


def cvxpy() -> Any:
    """Return the cvxpy module, or raise an error that names its extra."""
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
        return times(self.s, self.w)

    @property
    def total(self) -> Any:
        return self.s @ self.w + self.z


def times(left: np.ndarray, right: Any) -> Any:
    return cvxpy().multiply(left, right)


def counted(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int] | None = None) -> Any:
    """Return the sparse matrix of ones at (rows, columns), which adds entries up."""
    sparse = check.optional_module("scipy.sparse", "solvers")
    return sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape)


@dataclass
class Terms:
    """P f(c w/P) of many tokens: w and P are cvxpy expressions (m,), c an array (m,).

    ``alive`` is P, the number 1 in a program of rows. ``constraints`` collects what forms with
    variables of their own need.
    """

    w: Any
    alive: Any
    c: np.ndarray
    constraints: list[Any] = field(default_factory=list)

    @property
    def ratio(self) -> Any:
        return times(self.c, self.w)

    @property
    def single_row(self) -> bool:
        return isinstance(self.alive, int)

    def variable(self) -> Any:
        return cvxpy().Variable(self.c.shape)

    def relative(self, top: Any, bottom: Any) -> Any:
        """Return top ln(top/bottom), where one of them may be P."""
        if not self.single_row:
            return cvxpy().rel_entr(top, bottom)
        return -cvxpy().entr(top) if bottom is self.alive else -cvxpy().log(bottom)

    def square_over(self, top: Any, bottom: Any) -> Any:
        """Return something that is at least top²/bottom, and reaches it; one of them is P."""
        if self.single_row:
            return cvxpy().square(top) if bottom is self.alive else cvxpy().inv_pos(bottom)
        bound = self.variable()
        lower = cvxpy().vstack([2 * top, bound - bottom])
        self.constraints.append(cvxpy().SOC(bound + bottom, lower, axis=0))
        return bound

    def root(self) -> Any:
        """Return something that is at most √(w P), and reaches it."""
        if self.single_row:
            return cvxpy().sqrt(self.w)
        root = self.variable()
        lower = cvxpy().vstack([2 * root, self.w - self.alive])
        self.constraints.append(cvxpy().SOC(self.w + self.alive, lower, axis=0))
        return root

    def power(self, a: float) -> Any:
        """Return something on the convex or concave side of w^a P^(1−a), and that reaches it."""
        if self.single_row:
            return power(self.w, a)
        bound, one, cone = self.variable(), np.ones(self.c.shape), cvxpy().PowCone3D
        if 0 < a < 1:
            constraint = cone(self.w, self.alive, bound, a * one)
        elif a > 1:
            constraint = cone(bound, self.alive, self.w, one / a)
        else:
            constraint = cone(bound, self.w, self.alive, one / (1 - a))
        self.constraints.append(constraint)
        return bound


def power(w: Any, a: float) -> Any:
    """Return w^a: second-order cones for simple fractions, else power cones.

    cvxpy would round other exponents to a fraction, which moves D by 1e-6.
    """
    if Fraction(a).limit_denominator(LARGEST_DENOMINATOR) == Fraction(a):
        return cvxpy().power(w, a)
    return cvxpy().power(w, a, approx=False)


Form = TypeVar("Form", bound=Callable[..., Any])


def entered_in(forms: dict[type, Any], kind: type) -> Callable[[Form], Form]:
    """Return a decorator that enters a function as the form of a class."""

    def add(form: Form) -> Form:
        forms[kind] = form
        return form

    return add


_FORMS: dict[type, Callable[[Terms, Any], Any]] = {}
# decorator: a function of (terms, divergence) becomes the form of a generator class
perspective_of = partial(entered_in, _FORMS)


def perspective(terms: Terms, kind: FDivergence) -> Any:
    """Return P f(c w/P) of every token (m,), convex; see ``terms.constraints`` too."""
    if type(kind) not in _FORMS:
        raise ValueError(
            f"divergence: must have a form for cvxpy, entered with "
            f"@perspective_of({type(kind).__name__}) as in solvers/_perspective.py; "
            f"got {kind.spec!r}"
        )
    return _FORMS[type(kind)](terms, kind)


@perspective_of(KL)
def _kl(terms: Terms, f: FDivergence) -> Any:
    relative = terms.relative(terms.w, terms.alive)
    return times(terms.c, relative) + times(terms.c * np.log(terms.c), terms.w)


@perspective_of(ReverseKL)
def _reverse_kl(terms: Terms, f: FDivergence) -> Any:
    return terms.relative(terms.alive, terms.w) - times(np.log(terms.c), terms.alive)


@perspective_of(TotalVariation)
def _total_variation(terms: Terms, f: FDivergence) -> Any:
    return cvxpy().abs(terms.ratio - terms.alive) / 2


@perspective_of(PearsonChi2)
def _pearson_chi2(terms: Terms, f: FDivergence) -> Any:
    # (c w − P)²/P written out: where c is large its square would swamp the cone
    over = terms.square_over(terms.w, terms.alive)
    return times(terms.c**2, over) - 2 * terms.ratio + terms.alive


@perspective_of(NeymanChi2)
def _neyman_chi2(terms: Terms, f: FDivergence) -> Any:
    over = terms.square_over(terms.alive, terms.w)
    return terms.ratio - 2 * terms.alive + times(1 / terms.c, over)


@perspective_of(SquaredHellinger)
def _squared_hellinger(terms: Terms, f: FDivergence) -> Any:
    return terms.ratio + terms.alive - times(2 * np.sqrt(terms.c), terms.root())


@perspective_of(JensenShannon)
def _jensen_shannon(terms: Terms, f: FDivergence) -> Any:
    # ½[rel_entr(c w, m) + rel_entr(P, m)], m = (c w + P)/2, with all arguments of order one
    c = terms.c
    middle = times(c / (1 + c), terms.w) + times(1 / (1 + c), terms.alive)
    of_w = cvxpy().rel_entr(terms.w, middle) + times(np.log(2 * c / (1 + c)), terms.w)
    of_alive = terms.relative(terms.alive, middle) - times(np.log((1 + c) / 2), terms.alive)
    return (times(c, of_w) + of_alive) / 2


@perspective_of(Alpha)
def _alpha(terms: Terms, f: Any) -> Any:
    a = f.a
    power_term = times(terms.c**a, terms.power(a))
    return (power_term - a * terms.ratio + (a - 1) * terms.alive) / (a * (a - 1))
