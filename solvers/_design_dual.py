r"""A large design by its Lagrange dual: Newton's method on a few multipliers, and no solver.

With one smooth budget, the dual of ``_dual_bounds.py`` has as many variables as there are sums:
λ for the budget, μ for Σh = 1 and ν for each expectation; limits on tokens are its box. It is
convex and once differentiable, with the residuals of the sums as its gradient, and the h that
reaches each supremum is the row. Moving tokens, those at neither a limit nor the draft, give the
Hessian Σ q/(λ f″) v vᵀ, v = (f′, 1, c). Source: Boyd & Vandenberghe 2004, 5.2 and 9.5.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from cactus_theory.divergences import FDivergence

from ._constraints import (
    BudgetConstraint,
    Constraint,
    CustomConstraint,
    ExpectationConstraint,
    LimitConstraint,
    Quantities,
)
from ._dual_bounds import Lagrangian

# most tokens with q > 0 of a design that a conic solver solves in a second or two
SMALL = 5_000
# most Newton steps (usually five to ten) before the conic solver is tried, and most halvings
STEPS, HALVED = 60, 40
# largest residual of Σh, D and expectations in their units: a hundredth of FEASIBILITY
RESIDUAL = 1e-9
# most of the way to a multiplier of 0 that one step takes
SHARE = 0.9
# Armijo's share of the decrease that the gradient predicts, and the rounding error of a value
ARMIJO, ROUNDING = 1e-4, 1e-15
# ridge over the Hessian's largest entry: the Hessian may be singular where few tokens move
RIDGE = 1e-13


def applies(q: np.ndarray, constraints: Sequence[Constraint]) -> bool:
    """Return whether a design is large, with one smooth budget and no function of its own."""
    if int((q > 0).sum()) <= SMALL or any(isinstance(c, CustomConstraint) for c in constraints):
        return False
    budgets = [each for each in constraints if isinstance(each, BudgetConstraint)]
    kinds = [each.kind for each in budgets if math.isfinite(each.delta)]
    return len(budgets) == len(kinds) == 1 and isinstance(kinds[0], FDivergence) and kinds[0].smooth


def solve(quantities: Quantities, built: Iterable[Constraint], total: Any) -> np.ndarray:
    """Return the row h (m,); the dual values that go with it are left in the constraints."""
    q, constraints = quantities.row.q, list(built)
    program = Lagrangian.of(q, quantities.p[quantities.inside])
    (budget,) = (each for each in constraints if isinstance(each, BudgetConstraint))
    limits = [each for each in constraints if isinstance(each, LimitConstraint)]
    sums = [each for each in constraints if isinstance(each, ExpectationConstraint)]
    for limit in limits:
        limit.charge(program, q)
    program.add_budget(1.0, budget.kind, budget.delta)
    rows = [np.ones_like(q), *(each.inside / each.unit for each in sums)]
    right = np.array([1.0, *(each.limit / each.unit for each in sums)])
    dual = Dual(program, np.stack(rows), right)
    x, h = dual.solve()
    charged = [budget.constraints[0], total, *(each.constraints[0] for each in sums)]
    for constraint, multiplier in zip(charged, x, strict=True):
        constraint.dual_variables[0].save_value(np.array(multiplier))
    worth = dual.charged(x).slope(h)
    for limit in limits:
        if limit.constraints:
            price = limit.sign * limit.scale * worth[limit.places]
            limit.constraints[0].dual_variables[0].save_value(price)
    return h


class Dual:
    """The dual function of sums A h ≤ b, Σh = 1 and one budget, over a box.

    ``program`` is without its sums, but for the budget at multiplier 1; ``rows`` (1 + n, m) are
    those of Σh and the expectations' c, ``right`` (1 + n,) what the sums may be.
    """

    def __init__(self, program: Lagrangian, rows: np.ndarray, right: np.ndarray) -> None:
        self.program, self.rows, self.right = program, rows, right
        ((_, self.f),) = program.costs
        self.delta = program.constant

    def charged(self, x: np.ndarray) -> Lagrangian:
        free = self.program
        charged = Lagrangian(free.q, free.cap, free.low, free.high, x[1:] @ self.rows)
        charged.add_divergence(float(x[0]), self.f, self.delta)
        charged.constant += float(x[1:] @ self.right)
        return charged

    def residuals(self, h: np.ndarray) -> np.ndarray:
        """Return the slack of the budget and of each sum: the dual's gradient where h is best."""
        q = self.program.q
        spent = q @ self.f.f(torch.from_numpy(h / q)).numpy()
        return np.append(self.delta - spent, self.right - self.rows @ h)

    def hessian(self, x: np.ndarray, h: np.ndarray) -> np.ndarray:
        free, ratio = self.program, torch.from_numpy(h / self.program.q)
        still = np.isclose(h, free.cap, rtol=1e-14, atol=0) | (h <= free.low) | (h >= free.high)
        slope, bend = self.f.slope(ratio).numpy(), self.f.curvature(ratio).numpy()
        weight = np.divide(free.q, x[0] * bend, out=np.zeros_like(h), where=~still & (bend > 0))
        each = np.vstack([np.where(still, 0.0, slope), self.rows])
        return (each * weight) @ each.T

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the multipliers and their row h (m,); the caller checks both."""
        least = np.append([0.0, -np.inf], np.zeros(len(self.right) - 1))
        x = np.append([1.0, self._level()], least[2:])
        h, value = self._best(x)
        for _ in range(STEPS):
            gradient = self.residuals(h)
            free = (x > least) | (gradient < 0)
            if np.abs(gradient[free]).max(initial=0.0) <= RESIDUAL:
                break
            hessian = self.hessian(x, h)[np.ix_(free, free)]
            hessian += RIDGE * (1 + np.abs(hessian).max()) * np.eye(int(free.sum()))
            step = np.zeros_like(x)
            step[free] = -np.linalg.solve(hessian, gradient[free])
            for halved in 0.5 ** np.arange(HALVED):
                ahead = np.maximum(x + halved * step, least)
                ahead[0] = max(ahead[0], (1 - SHARE) * x[0])
                row, reached = self._best(ahead)
                promised = min(0.0, float(gradient @ (ahead - x)))
                if reached <= value + ARMIJO * promised + ROUNDING:
                    break
            else:
                break
            x, h, value = ahead, row, reached
        return x, h

    def _best(self, x: np.ndarray) -> tuple[np.ndarray, float]:
        charged = self.charged(x)
        return charged.best(), charged.bound()

    def _level(self) -> float:
        """Return about the μ of Σh = 1 at λ = 1 and no expectation."""
        low, high = -1e3, 1e3
        for _ in range(40):
            middle = (low + high) / 2
            x = np.append([1.0, middle], np.zeros(len(self.right) - 1))
            heavy = self.charged(x).best().sum() > 1
            low, high = (middle, high) if heavy else (low, middle)
        return (low + high) / 2
