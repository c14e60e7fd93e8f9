"""Solve a design, prove the answer, or name the constraints that cannot be kept together."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _design_dual, _program
from ._constraints import (
    BudgetConstraint,
    Built,
    BuiltLimit,
    Constraint,
    CustomConstraint,
    Dual,
    LimitConstraint,
    Quantities,
)
from ._dual import Lagrangian
from ._perspective import Scaled, cvxpy
from ._program import FEASIBILITY, OPTIMALITY, SMALLEST_SCALE, Attempted, SolverGaveUp, unproven
from .per_proposal import raised_ceiling

# rounds of rescaling the entries between their limits, once the others are set to theirs
POLISHING = 8
# how a large design is solved first
DUAL = ("lagrange dual", {})
# a price below this, relative to the largest of a design (or to 1), is a solver's noise
NOISE = 1e-6


class Infeasible(ValueError):
    """No row keeps all constraints; ``constraints`` names a smallest set of them in conflict.

    ``rules`` is the older name of the same.
    """

    def __init__(self, constraints: Sequence[str]) -> None:
        self.constraints = self.rules = tuple(constraints)
        super().__init__(f"constraints: no row keeps all of: {'; '.join(self.constraints)}")


@dataclass
class Attempt:
    """A program in one scaling, solved or not, with its row cleaned and what proves it."""

    quantities: Quantities
    constraints: dict[str, Built]
    total: Any
    status: str
    h: np.ndarray | None
    solver: str
    bound: float = math.inf
    proof: str = "dual bound"

    @property
    def row(self) -> np.ndarray:
        """Return h (m,) where q > 0, of an attempt that has one."""
        assert self.h is not None
        return self.h

    @property
    def cap(self) -> np.ndarray:
        """Return p (m,) where q > 0."""
        return self.quantities.p[self.quantities.inside]

    @property
    def value(self) -> float:
        return float(np.minimum(self.cap, self.row).sum())

    def broken(self) -> str | None:
        """Return which constraint the row breaks, if any."""
        if self.h is None:
            return self.status
        if not abs(self.h.sum() - 1) <= FEASIBILITY:
            return f"{self.status}, but the row sums to {self.h.sum():.9g}"
        for name, each in self.constraints.items():
            if not each.slack(self.h) >= -FEASIBILITY:
                return f"{self.status}, but {name} is exceeded by {-each.slack(self.h):.3g}"
        return None

    def proven(self) -> float:
        """Return the bound at the attempt's multipliers, ∞ where a constraint has no tangent."""
        lagrangian = Lagrangian.of(self.quantities.row.q, self.cap)
        lagrangian.add_linear(float(np.sum(self.total.dual_value)), 1.0, 1.0)
        if not all([each.charge(lagrangian, self.row) for each in self.constraints.values()]):
            return math.inf
        bound = lagrangian.bound()
        return bound if math.isfinite(bound) else math.inf


@dataclass
class Program(Attempted[Attempt]):
    """The program of a design; it remembers what its attempts came to."""

    q: np.ndarray
    p: np.ndarray
    constraints: Sequence[Constraint]
    refused: int = 0  # attempts that found no row at all
    earlier: float = math.nan  # the value of the last row that kept its constraints

    promise = f"the row must keep every constraint within {FEASIBILITY:g} and meet its bound"

    @property
    def linear(self) -> bool:
        return all(each.linear for each in self.constraints)

    @property
    def solvers(self) -> list[_program.Solver]:
        """Return solvers to try in turn, the dual before them where it is quicker."""
        return [DUAL] * _design_dual.applies(self.q, self.constraints) + super().solvers

    @property
    def guess(self) -> np.ndarray:
        """Return a guess of the row's size: the draft, kept between the target and the limits."""
        q, inside = self.q, self.q > 0
        ceiling = np.ones(int(inside.sum()))
        floor, limit = np.zeros_like(q), np.ones_like(q)
        for each in self.constraints:
            if isinstance(each, BudgetConstraint):
                ceiling = np.minimum(ceiling, raised_ceiling(q[inside], each.kind, each.delta))
            if isinstance(each, LimitConstraint) and each.sign > 0:
                limit[each.tokens] = np.minimum(limit[each.tokens], each.limit)
            elif isinstance(each, LimitConstraint):
                floor[each.tokens] = np.maximum(floor[each.tokens], each.limit)
        guess = np.minimum(np.clip(self.p[inside], q[inside], ceiling), limit[inside])
        return np.maximum(np.maximum(guess, floor[inside]), SMALLEST_SCALE * q[inside])

    def build(self, scale: np.ndarray) -> tuple[Quantities, dict[str, Built]]:
        """Return the quantities in one scaling, and the constraints on them by name."""
        w = cvxpy().Variable(len(scale), nonneg=True)
        quantities = Quantities(self.q, self.p, Scaled(self.q[self.q > 0], scale, w))
        return quantities, {each.name: each.build(quantities) for each in self.constraints}

    def attempt(self, scale: np.ndarray, solver: _program.Solver) -> Attempt:
        """Return one solver's answer, a row or only its status."""
        cp, (quantities, built) = cvxpy(), self.build(scale)
        row = quantities.row
        total = row.total == 1
        limits = [total, *(c for each in built.values() for c in each.constraints)]
        problem = cp.Problem(cp.Maximize(quantities.acceptance), limits)
        if solver == DUAL:
            h = _cleaned(_design_dual.solve(quantities, built.values(), total), row.q, built)
            return Attempt(quantities, built, total, "proven", h, solver[0])
        solved = _program.believable(problem, *solver) and total.dual_value is not None
        h = _cleaned(scale * row.w.value, row.q, built) if solved else None
        return Attempt(quantities, built, total, problem.status or "no answer", h, solver[0])

    def fault(self, answer: Attempt) -> str | None:
        """Return why a row is not accepted; its bound and the kind of proof are noted in it."""
        self.refused += "infeasible" in answer.status
        broken = answer.broken()
        if broken:
            return broken
        value, answer.bound = answer.value, answer.proven()
        fault = unproven(answer.status, value, answer.bound)
        same = abs(value - self.earlier) <= OPTIMALITY and answer.bound > value
        if fault and same and any(isinstance(each, CustomConstraint) for each in self.constraints):
            answer.bound, answer.proof = max(value, self.earlier), "two scalings"
            return None
        self.earlier = value
        return fault

    def rescaled(self, answer: Attempt | None, scale: np.ndarray) -> np.ndarray:
        """Return the size of a row, or half way to the target if there was none."""
        q = self.q[self.q > 0]
        guess = np.sqrt(scale * q) if answer is None or answer.h is None else answer.h
        return np.maximum(guess, SMALLEST_SCALE * q)

    def conflict(self) -> list[str]:
        """Return a smallest set in conflict, by leaving out every constraint that can be."""
        kept = list(self.constraints)
        for each in self.constraints:
            fewer = [other for other in kept if other is not each]
            if fewer and Program(self.q, self.p, fewer)._impossible():
                kept = fewer
        return [each.name for each in kept]

    def _impossible(self) -> bool:
        """Return whether the solver finds no row that keeps all constraints."""
        solver = _program.solvers_of(self.linear)[0]
        return "infeasible" in self.attempt(self.guess, solver).status


def _cleaned(raw: np.ndarray, q: np.ndarray, constraints: dict[str, Built]) -> np.ndarray:
    """Return the row inside its limits to the last digit, summing to 1 up to rounding."""
    box = Lagrangian.of(q, q)
    for built in constraints.values():
        if isinstance(built, BuiltLimit):
            built.charge(box, raw)
    h = np.clip(raw, box.low, np.maximum(box.low, box.high))
    for _ in range(POLISHING):
        free = (h > box.low) & (h < box.high)
        mass = h[free].sum()
        if mass <= 0:
            break
        h[free] *= (1 - h[~free].sum()) / mass
        h = np.clip(h, box.low, np.maximum(box.low, box.high))
    return h


def solve(q: np.ndarray, p: np.ndarray, constraints: Sequence[Constraint]) -> dict[str, Any]:
    """Return the fields of a solved design; see :meth:`solvers.design.Design.solve`."""
    started = time.perf_counter()
    program = Program(q, p, constraints)
    zero = [c for c in constraints if isinstance(c, BudgetConstraint) and c.delta == 0]
    try:
        answer = _lossless(program, zero[0]) if zero else program.solve(program.guess)
    except SolverGaveUp:
        if program.refused > 1:
            raise Infeasible(program.conflict()) from None
        raise
    h, target, value = answer.row, np.zeros_like(q), answer.value
    target[q > 0] = h
    duals = {name: math.nan if zero else each.price(h) for name, each in answer.constraints.items()}
    return {
        "target": target, "acceptance": value, "lossless": float(np.minimum(p, q).sum()),
        "slacks": {name: each.slack(h) for name, each in answer.constraints.items()},
        "duals": duals if zero else _prices(duals),
        "bound": answer.bound, "gap": answer.bound - value, "proof": answer.proof,
        "solver": answer.solver, "status": answer.status,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _lossless(program: Program, zero: BudgetConstraint) -> Attempt:
    """Return h = q, the only row within a budget of 0, if it keeps the other constraints."""
    q = program.q[program.q > 0]
    quantities, built = program.build(q)
    answer = Attempt(quantities, built, None, "exact", q, "identity", proof="only row")
    broken = [name for name, each in built.items() if each.slack(q) < -FEASIBILITY]
    if broken:
        raise Infeasible([zero.name, broken[0]])
    answer.bound = answer.value
    return answer


def _prices(duals: dict[str, Dual]) -> dict[str, Dual]:
    """Return the prices with those that are noise beside the others set to 0."""
    sizes = [abs(price) for dual in duals.values() for price in prices_of(dual)]
    least = NOISE * max(1.0, *sizes) if sizes else 0.0

    def clean(price: float) -> float:
        return price if abs(price) > least else 0.0

    return {
        name: {token: clean(price) for token, price in dual.items()}
        if isinstance(dual, dict)
        else clean(dual)
        for name, dual in duals.items()
    }


def prices_of(dual: Dual) -> list[float]:
    return list(dual.values()) if isinstance(dual, dict) else [dual]
