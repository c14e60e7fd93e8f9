"""The constraints of :class:`solvers.design.Design`: how each is built, measured and priced."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from cactus_theory.divergences import Divergence

from . import _divergence_budget
from ._dual_bounds import Lagrangian
from ._perspective import Scaled
from ._row_program import divergence_of

Dual = float | dict[int, float]
# a limit binds if the row is within this relative distance of it: interior-point answers are within
# 1e-5 of the limits that bind, and further than 1e-4 from all others
TIGHT = 1e-4


@dataclass
class Constraint:
    """A named constraint on the row h that is designed.

    A subclass has these methods, of which the last three are called once the program is solved.
    h (m,) is the row on the tokens with q > 0:

    * ``build(row, inside)`` returns the cvxpy constraints on a row; ``inside`` (V,) marks the
      tokens with q > 0. ``placed`` returns a copy of the constraint with ``constraints`` built.
    * ``slack(h)`` is the least distance to the limit; negative if the constraint is broken.
    * ``price(h)`` is the dual value, the acceptance gained per unit by which the limit is relaxed.
      It is 0 unless h is at the limit: elsewhere the solver's dual value is rounding noise, which
      the conversion to a price would enlarge.
    * ``charge(lagrangian)`` adds the constraint to a :class:`Lagrangian`, which bounds the optimum.
    """

    name: str
    row: Scaled = field(init=False, repr=False)  # the row of the program
    constraints: list[Any] = field(init=False, repr=False)

    linear = True
    build: ClassVar[Any]
    slack: ClassVar[Any]
    price: ClassVar[Any]
    charge: ClassVar[Any]

    def placed(self, row: Scaled, inside: np.ndarray) -> "Constraint":
        placed = copy.copy(self)
        placed.row, placed.constraints = row, placed.build(row, inside)
        return placed


@dataclass
class BudgetConstraint(Constraint):
    """The constraint D(h‖q) ≤ δ, for any divergence."""

    kind: Divergence
    delta: float

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.kind.linear or math.isinf(self.delta)

    def build(self, row: Scaled, inside: np.ndarray) -> list[Any]:
        self.budget = _divergence_budget.budget(row, self.kind, self.delta)
        return self.budget.constraints

    def slack(self, h: np.ndarray) -> float:
        return self.delta - divergence_of(self.kind, h, self.row.q)

    def price(self, h: np.ndarray) -> Dual:
        return self.budget.price if self.slack(h) <= TIGHT * self.delta else 0.0

    def charge(self, lagrangian: Lagrangian) -> None:
        lagrangian.add_budget(self.budget.slope, self.kind, self.delta)
        lagrangian.add_linear(self.budget.tilt * self.budget.slope, 1.0, 1.0)


@dataclass
class LimitConstraint(Constraint):
    """The constraints h ≤ limit (``sign`` 1) or h ≥ limit (``sign`` −1) on some tokens."""

    tokens: np.ndarray
    limit: np.ndarray
    sign: int

    def build(self, row: Scaled, inside: np.ndarray) -> list[Any]:
        """Return the limits on the constraint's tokens with q > 0; tokens with q = 0 have h = 0."""
        self.possible = inside[self.tokens]
        # numbers of these tokens among the tokens with q > 0
        self.places = (np.cumsum(inside) - 1)[self.tokens[self.possible]]
        self.scale, self.limits = row.s[self.places], self.limit[self.possible]
        excess = self.sign * (row.w[self.places] - self.limits / self.scale)
        return [excess <= 0] if len(self.places) else []

    def slack(self, h: np.ndarray) -> float:
        return float(self._room(h).min(initial=math.inf))

    def _room(self, h: np.ndarray) -> np.ndarray:
        return self.sign * (self.limits - h[self.places])

    def price(self, h: np.ndarray) -> Dual:
        prices = np.zeros(len(self.tokens))
        if self.constraints:
            duals = np.maximum(self.constraints[0].dual_value, 0.0) / self.scale
            prices[self.possible] = np.where(self._room(h) <= TIGHT * self.limits, duals, 0.0)
        return dict(zip(self.tokens.tolist(), prices.tolist(), strict=True))

    def charge(self, lagrangian: Lagrangian) -> None:
        end = np.full_like(lagrangian.q, self.sign * math.inf)  # no limit on other tokens
        end[self.places] = self.limits
        low, high = (0.0, end) if self.sign > 0 else (end, 1.0)
        lagrangian.narrow(low, high)


@dataclass
class ExpectationConstraint(Constraint):
    """The constraint Σ c h ≤ limit with c = ``values``, both sides divided by the largest |c|."""

    values: np.ndarray
    limit: float

    def build(self, row: Scaled, inside: np.ndarray) -> list[Any]:
        self.inside = self.values[inside]
        self.unit = float(np.abs(self.inside).max(initial=0.0)) or 1.0
        mean = (self.inside * row.s / self.unit) @ row.w
        return [mean <= self.limit / self.unit]

    def slack(self, h: np.ndarray) -> float:
        return (self.limit - float(self.inside @ h)) / self.unit

    @property
    def dual(self) -> float:
        return max(0.0, float(self.constraints[0].dual_value)) / self.unit

    def price(self, h: np.ndarray) -> Dual:
        return self.dual if self.slack(h) <= TIGHT else 0.0

    def charge(self, lagrangian: Lagrangian) -> None:
        lagrangian.add_linear(self.dual, self.inside, self.limit)
