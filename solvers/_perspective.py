r"""Write the terms of f-divergences as cvxpy expressions, in one form for each divergence class.

A row is h = s∘w (entry by entry) on the tokens with q > 0, plus a total mass z on the tokens with
q = 0 (z is 0 unless the program allows such mass and f′(∞) < ∞). The solver's variable is w, whose
entries are near one if the fixed scale s is near h; with h itself as the variable, solvers fail at
a thousand tokens.

A block's program pays :math:`Σ q P f(g/(qP))` at every node. Here g is the probability of emitting
a token at the node, over that of drafting the node, and the alive ratio P is a variable, too. So
the term is the perspective of :math:`q f`, which is jointly convex. With g = s∘w and c = s/q, each
token's term is q times P f(c w/P), computed below for all tokens of all nodes at once. The other
programs have one row and P = 1, where cvxpy's own atoms give the same cones with one variable less.

The forms follow from the generators in :mod:`cactus_theory.divergences`. The solvers accept a new
divergence only with a form, which any imported file may register by :func:`perspective_of`.
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
    """Return the cvxpy module, or raise an error that names the extra which installs it."""
    return check.optional_module("cvxpy", "solvers")


@dataclass(frozen=True)
class Scaled:
    """The row of a program: h = s∘w where q > 0, and mass z where q = 0; arrays float64 (m,)."""

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
    """Return the sparse matrix with ones at (rows, columns); a product with it adds entries up."""
    sparse = check.optional_module("scipy.sparse", "solvers")
    return sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape)


@dataclass
class Terms:
    """The terms P f(c w/P) of m tokens: w and P are cvxpy expressions (m,), c an array (m,).

    ``alive`` is P, which is the number 1 in a program of one row. ``constraints`` collects the
    constraints on the auxiliary variables that some forms add.
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
        """Return top ln(top/bottom), where ``top`` or ``bottom`` is P."""
        if not self.single_row:
            return cvxpy().rel_entr(top, bottom)
        return -cvxpy().entr(top) if bottom is self.alive else -cvxpy().log(bottom)

    def square_over(self, top: Any, bottom: Any) -> Any:
        """Return an expression ≥ top²/bottom, equal at the optimum; ``top`` or ``bottom`` is P."""
        if self.single_row:
            return cvxpy().square(top) if bottom is self.alive else cvxpy().inv_pos(bottom)
        # ‖(2 top, bound − bottom)‖ ≤ bound + bottom says top² ≤ bound · bottom
        bound = self.variable()
        lower = cvxpy().vstack([2 * top, bound - bottom])
        self.constraints.append(cvxpy().SOC(bound + bottom, lower, axis=0))
        return bound

    def root(self) -> Any:
        """Return an expression ≤ √(w P), equal at the optimum."""
        if self.single_row:
            return cvxpy().sqrt(self.w)
        # ‖(2 root, w − P)‖ ≤ w + P says root² ≤ w P
        root = self.variable()
        lower = cvxpy().vstack([2 * root, self.w - self.alive])
        self.constraints.append(cvxpy().SOC(self.w + self.alive, lower, axis=0))
        return root

    def power(self, a: float) -> Any:
        """Return an expression that bounds w^a P^(1−a), with equality at the optimum.

        The bound is from above for a < 0 or a > 1 (a convex power), from below for 0 < a < 1.
        """
        if self.single_row:
            return power(self.w, a)
        # PowCone3D(x, y, z, a) says |z| ≤ x^a y^(1−a)
        bound, ones, cone = self.variable(), np.ones(self.c.shape), cvxpy().PowCone3D
        if 0 < a < 1:
            constraint = cone(self.w, self.alive, bound, a * ones)
        elif a > 1:
            constraint = cone(bound, self.alive, self.w, ones / a)
        else:
            constraint = cone(bound, self.w, self.alive, ones / (1 - a))
        self.constraints.append(constraint)
        return bound


def power(w: Any, a: float) -> Any:
    """Return w^a, written with second-order cones if a is a simple fraction, else power cones.

    By default cvxpy would round any other exponent to a fraction, which changes D by 1e-6.
    """
    if Fraction(a).limit_denominator(LARGEST_DENOMINATOR) == Fraction(a):
        return cvxpy().power(w, a)
    return cvxpy().power(w, a, approx=False)


Form = TypeVar("Form", bound=Callable[..., Any])


def entered_in(forms: dict[type, Any], kind: type) -> Callable[[Form], Form]:
    """Return a decorator that registers a function in ``forms`` for a divergence class."""

    def add(form: Form) -> Form:
        forms[kind] = form
        return form

    return add


_FORMS: dict[type, Callable[[Terms, Any], Any]] = {}
# decorator: registers a function of (terms, divergence) as the form of a divergence class
perspective_of = partial(entered_in, _FORMS)


def perspective(terms: Terms, kind: FDivergence) -> Any:
    """Return P f(c w/P) of every token (m,), convex; some forms add to ``terms.constraints``."""
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
    # (c w − P)²/P is multiplied out: a large c would otherwise dominate the entries of the cone
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
    # ½[rel_entr(c w, m) + rel_entr(P, m)], m = (c w + P)/2; with all arguments
    # of order one, ``middle`` is 2m/(1 + c)
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
