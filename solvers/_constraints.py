"""The quantities that constraints of a design use by name, and the kinds of constraints.

Each kind builds, measures and prices itself.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence

from . import _attempts, _conic
from ._attempts import divergence_of
from ._conic import left_side
from ._dual_bounds import Lagrangian
from ._perspective import Scaled, cvxpy

Dual = float | dict[int, float]
# relative distance from a limit within which it binds: interior-point answers are within 1e-5 of
# limits that bind, and further than this from all others
TIGHT = 1e-4


@dataclass(frozen=True)
class Quantities:
    """The row being designed, as cvxpy expressions and numpy rows over the vocabulary (V,)."""

    q: np.ndarray
    p: np.ndarray
    row: Scaled

    @property
    def h(self) -> Any:
        """Return the row being designed, affine; 0 where q = 0."""
        return self._spread(self.row.s)

    @property
    def ratio(self) -> Any:
        """Return h/q, affine; 0 where q = 0."""
        return self._spread(self.row.s / self.row.q)

    @property
    def accepted(self) -> Any:
        """Return min(p, h) of each token, concave: what is drafted and accepted."""
        return cvxpy().minimum(self.p, self.h)

    @property
    def acceptance(self) -> Any:
        """Return Σ min(p, h), concave."""
        cp, s = cvxpy(), self.row.s
        return s @ cp.minimum(self.p[self.inside] / s, self.row.w)

    @property
    def rejection(self) -> Any:
        """Return 1 − Σ min(p, h), convex."""
        return 1 - self.acceptance

    @property
    def inside(self) -> np.ndarray:
        return self.q > 0

    def divergence(self, spec: str | Divergence) -> Any:
        """Return D(h‖q), convex, of an f-divergence: sums of several may be bounded too.

        A Rényi or the max-divergence is a ValueError: ask for a budget on them instead.
        """
        return left_side(self.row, _attempts.additive(spec, "here"))

    def _spread(self, scale: np.ndarray) -> Any:
        """Return scale∘w at the tokens with q > 0 among zeros."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        place = (np.flatnonzero(self.inside), np.arange(len(scale)))
        return sparse.csc_matrix((scale, place), (len(self.q), len(scale))) @ self.row.w


@dataclass
class Constraint:
    """A named constraint on the row being designed.

    ``build`` returns cvxpy's constraints, and remembers what reads their dual values; ``placed`` in
    a program it has them as ``constraints``. Once these are solved, at a row h (m,) on tokens with
    q > 0, ``slack`` is the least distance to the limit (negative: broken), ``price`` the dual
    value, in acceptance per unit of room (0 unless h is at the limit: a solver's dual of what does
    not bind is noise, and divided by the scale of an unlikely token it may be anything), and
    ``charge`` enters the constraint into a bound, and returns whether that could be done.
    """

    name: str
    row: Scaled = field(init=False, repr=False)  # where it is placed
    constraints: list[Any] = field(init=False, repr=False)

    linear = True
    build: ClassVar[Any]
    slack: ClassVar[Any]
    price: ClassVar[Any]
    charge: ClassVar[Any]

    def placed(self, quantities: Quantities) -> "Constraint":
        inside = copy.copy(self)
        inside.row, inside.constraints = quantities.row, inside.build(quantities)
        return inside


@dataclass
class BudgetConstraint(Constraint):
    """D(h‖q) ≤ δ, of any divergence."""

    kind: Divergence
    delta: float

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.kind.linear or math.isinf(self.delta)

    def build(self, quantities: Quantities) -> list[Any]:
        self.budget = _conic.budget(quantities.row, self.kind, self.delta)
        return self.budget.constraints

    def slack(self, h: np.ndarray) -> float:
        return self.delta - divergence_of(self.kind, h, self.row.q)

    def price(self, h: np.ndarray) -> Dual:
        return self.budget.price if self.slack(h) <= TIGHT * self.delta else 0.0

    def charge(self, lagrangian: Lagrangian, h: np.ndarray) -> bool:
        lagrangian.add_budget(self.budget.slope, self.kind, self.delta)
        lagrangian.add_linear(self.budget.tilt * self.budget.slope, 1.0, 1.0)
        return True


@dataclass
class LimitConstraint(Constraint):
    """h ≤ limit (``sign`` 1) or h ≥ limit (−1) on some tokens."""

    tokens: np.ndarray
    limit: np.ndarray
    sign: int

    def build(self, quantities: Quantities) -> list[Any]:
        """Return the limits on those of the tokens that can have mass at all."""
        self.possible = quantities.inside[self.tokens]
        self.places = (np.cumsum(quantities.inside) - 1)[self.tokens[self.possible]]
        self.scale, self.most = quantities.row.s[self.places], self.limit[self.possible]
        excess = self.sign * (quantities.row.w[self.places] - self.most / self.scale)
        return [excess <= 0] if len(self.places) else []

    def slack(self, h: np.ndarray) -> float:
        return float(self._room(h).min(initial=math.inf))

    def _room(self, h: np.ndarray) -> np.ndarray:
        return self.sign * (self.most - h[self.places])

    def price(self, h: np.ndarray) -> Dual:
        prices = np.zeros(len(self.tokens))
        if self.constraints:
            duals = np.maximum(self.constraints[0].dual_value, 0.0) / self.scale
            prices[self.possible] = np.where(self._room(h) <= TIGHT * self.most, duals, 0.0)
        return dict(zip(self.tokens.tolist(), prices.tolist(), strict=True))

    def charge(self, lagrangian: Lagrangian, h: np.ndarray) -> bool:
        end = np.full_like(lagrangian.q, math.inf)
        end[self.places] = self.sign * self.most
        lagrangian.narrow(*((0.0, end) if self.sign > 0 else (-end, 1.0)))
        return True


@dataclass
class ExpectationConstraint(Constraint):
    """Σ c h ≤ limit; the unit of the constraint is the largest |c|."""

    values: np.ndarray
    limit: float

    def build(self, quantities: Quantities) -> list[Any]:
        self.inside = self.values[quantities.inside]
        self.unit = float(np.abs(self.inside).max(initial=0.0)) or 1.0
        mean = (self.inside * quantities.row.s / self.unit) @ quantities.row.w
        return [mean <= self.limit / self.unit]

    def slack(self, h: np.ndarray) -> float:
        return (self.limit - float(self.inside @ h)) / self.unit

    @property
    def dual(self) -> float:
        return max(0.0, float(self.constraints[0].dual_value)) / self.unit

    def price(self, h: np.ndarray) -> Dual:
        return self.dual if self.slack(h) <= TIGHT else 0.0

    def charge(self, lagrangian: Lagrangian, h: np.ndarray) -> bool:
        lagrangian.add_linear(self.dual, self.inside, self.limit)
        return True


@dataclass
class CustomConstraint(Constraint):
    """Whatever convex ≤, ≥ or == constraints a function of the named quantities returns."""

    make: Callable[[Quantities], Any]

    linear = False

    def build(self, quantities: Quantities) -> list[Any]:
        """Return the function's constraints.

        A TypeError if they are not cvxpy's ≤, ≥ or ==, or a list of them; a ValueError if they
        are not convex, or about other variables than the named quantities.
        """
        one_or_more = self.make(quantities)
        several = isinstance(one_or_more, list | tuple)
        constraints = list(one_or_more) if several else [one_or_more]
        for constraint in constraints:
            self._check(constraint, quantities.row.w)
        return constraints

    def _check(self, constraint: Any, w: Any) -> None:
        kinds = cvxpy().constraints
        if not isinstance(constraint, kinds.Inequality | kinds.Equality):
            kind = type(constraint).__name__
            raise TypeError(f"{self.name}: must return cvxpy ≤, ≥ or ==; got {kind}")
        if (about := {variable.id for variable in constraint.variables()}) != {w.id}:
            others = f"{len(about - {w.id})} other variables" if about else "constants alone"
            raise ValueError(f"{self.name}: must be about the named quantities; got {others}")
        if not constraint.is_dcp():
            raise ValueError(
                f"{self.name}: must be convex by cvxpy's rules; got a left minus a right "
                f"side that is {constraint.expr.curvature.lower()}"
            )

    def slack(self, h: np.ndarray) -> float:
        return min(self._rooms(h), default=0.0)

    def _rooms(self, h: np.ndarray) -> list[float]:
        self.row.w.value = h / self.row.s
        equal = cvxpy().constraints.Equality
        values = [
            np.abs(c.expr.value) if isinstance(c, equal) else c.expr.value for c in self.constraints
        ]
        return [-float(np.max(value)) for value in values]

    def price(self, h: np.ndarray) -> Dual:
        pairs = zip(self.constraints, self._rooms(h), strict=True)
        prices = [float(np.sum(c.dual_value)) if room <= TIGHT else 0.0 for c, room in pairs]
        return prices[0] if len(prices) == 1 else dict(enumerate(prices))

    def charge(self, lagrangian: Lagrangian, h: np.ndarray) -> bool:
        """Charge for the constraints' tangents at ``h``, which no feasible row violates."""
        self.row.w.value = h / self.row.s
        for constraint in self.constraints:
            slopes = constraint.expr.grad[self.row.w]
            if slopes is None:
                return False
            sign = -math.inf if isinstance(constraint, cvxpy().constraints.Equality) else 0.0
            duals = np.maximum(np.ravel(constraint.dual_value, order="F"), sign)
            row = (slopes @ duals) / self.row.s
            if not np.isfinite(row).all():
                return False
            value = float(duals @ np.ravel(constraint.expr.value, order="F"))
            lagrangian.add_linear(1.0, row, float(row @ h) - value)
        return True
