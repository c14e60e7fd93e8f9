r"""Design a row h that maximises acceptance under constraints that you choose.

.. math:: \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \in Δ,\; h ≪ q,\;\text{your constraints}

>>> from solvers.design import Design
>>> import numpy as np
>>> q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
>>> row = Design(q, p).budget("kl", 0.1).cap(1.5).solve()
>>> round(float(row.target[2]), 6)
0.3

A design may have any number of divergence budgets, protected tokens, floors, caps on the ratio h/q
and expectations. Every answer is proven: the row must meet every constraint within 1e-7, and its
acceptance must be within 1e-6 of an upper bound from the solver's multipliers.
A row of 20,000 tokens takes 20 seconds.
"""

import copy
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence

from . import _attempts
from ._attempts import FEASIBILITY, SMALLEST_SCALE, Attempted, SolverGaveUp, unproven
from ._constraints import (
    BudgetConstraint,
    Constraint,
    Dual,
    ExpectationConstraint,
    LimitConstraint,
)
from ._dual_bounds import Lagrangian
from ._perspective import Scaled, cvxpy
from .per_proposal import raised_ceiling

# most rounds of rescaling the entries that lie between their limits, so that the row sums to 1
POLISHING = 8

Tokens = int | Iterable[int]


class Infeasible(ValueError):
    """No row meets all constraints; ``constraints`` names constraints in conflict.

    If any one of these constraints is dropped, the others can be met.
    """

    def __init__(self, constraints: Sequence[str]) -> None:
        self.constraints = tuple(constraints)
        super().__init__(f"constraints: no row meets all of: {'; '.join(self.constraints)}")


@dataclass(frozen=True)
class DesignedRow:
    """The solution of a design: the row h, its acceptance, slacks and duals, and the proof.

    ``duals`` has for each constraint how much acceptance rises if the constraint is relaxed: per
    unit of a higher budget or ``at_most``, or of a lower ``at_least``. Limits on tokens (caps,
    floors) have a dual for each token, per unit of its probability. A dual is 0 if the row is
    further than 1e-4 (relative) from the limit.
    """

    target: np.ndarray  # (V,) float64, the row h to verify against instead of q
    acceptance: float  # Σ min(p, h)
    lossless: float  # Σ min(p, q), for comparison
    slacks: dict[str, float]  # distance of each constraint (limits: least token's) from binding
    duals: dict[str, Dual]
    bound: float  # proven upper bound on the acceptance
    gap: float  # bound minus acceptance
    solver: str
    status: str
    seconds: float  # wall time


@dataclass(frozen=True)
class Design:
    """A target row, a draft row and constraints on h, the row to verify against.

    Each method that adds a constraint returns a new design. ``solve`` returns the designed row.

    Parameters
    ----------
    target_probs, draft_probs : (V,) probabilities q and p of one dtype.

    Raises
    ------
    ValueError, TypeError
        Not a pair of rows, an unknown divergence, a token or a number out of range, a name that is
        already used; each method checks its arguments.
    """

    target_probs: Any
    draft_probs: Any
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        q, p = _attempts.one_pair(self.target_probs, self.draft_probs)
        object.__setattr__(self, "target_probs", q)
        object.__setattr__(self, "draft_probs", p)

    def budget(self, divergence: str | Divergence, delta: float) -> "Design":
        """Add D(h‖q) ≤ delta, in the divergence's unit (nats for KL)."""
        kind, amount = _attempts.checked_budget(divergence, delta)
        return self._with(BudgetConstraint(f"budget {kind.spec}", kind, amount))

    def protect(self, tokens: Tokens, name: str = "protect") -> "Design":
        """Add h ≤ q on ``tokens``, which are then never emitted more often than by the target."""
        ids = self._tokens(tokens)
        return self._with(LimitConstraint(name, ids, limit=self.target_probs[ids], sign=1))

    def cap(self, ratio: float, tokens: Tokens | None = None, name: str | None = None) -> "Design":
        """Add h ≤ ratio · q on ``tokens``, or on all tokens."""
        ratio = check.number("ratio", ratio, 0.0)
        ids = np.arange(len(self.target_probs)) if tokens is None else self._tokens(tokens)
        name = name or ("cap" if tokens is None else f"cap {','.join(map(str, ids))}")
        limits = np.minimum(ratio * self.target_probs[ids], 1.0)
        return self._with(LimitConstraint(name, ids, limit=limits, sign=1))

    def floor(self, floors: Mapping[int, float]) -> "Design":
        """Add h ≥ floors[token] for each token, as separate constraints."""
        design = self
        for token, value in floors.items():
            ids, least = self._tokens(token), check.number(f"floor {token}", value, 0.0, 1.0)
            if least > 0 and self.target_probs[ids[0]] == 0:
                raise ValueError(
                    f"floor {token}: must be 0 where the target is 0, as h is; got {value!r}"
                )
            limit = np.array([least])
            design = design._with(LimitConstraint(f"floor {token}", ids, limit=limit, sign=-1))
        return design

    def expect(
        self,
        values: Any,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        name: str = "expectation",
    ) -> "Design":
        """Add Σ values·h ≤ at_most, or ≥ at_least; ``values`` (V,) may have any sign."""
        if (at_most is None) == (at_least is None):
            raise ValueError(f"{name}: exactly one of at_most and at_least must be given")
        row = np.asarray(values, dtype=np.float64)
        if row.shape != self.target_probs.shape or not np.isfinite(row).all():
            raise ValueError(
                f"{name}: values must be {len(self.target_probs)} finite numbers; "
                f"got shape {row.shape}"
            )
        sign, limit = (1, at_most) if at_least is None else (-1, at_least)
        limit = check.number(name, limit, -np.inf)
        return self._with(ExpectationConstraint(name, sign * row, sign * limit))

    def solve(self) -> DesignedRow:
        """Maximise acceptance within the constraints.

        Raises
        ------
        Infeasible
            No row meets all constraints (a ValueError).
        SolverGaveUp, ModuleNotFoundError
            No answer passed the check (a RuntimeError); cvxpy is missing.
        """
        return _solved(self.target_probs, self.draft_probs, self.constraints)

    def _with(self, constraint: Constraint) -> "Design":
        if any(constraint.name == other.name for other in self.constraints):
            raise ValueError(
                f"constraints: must have names of their own; got {constraint.name!r} twice"
            )
        design = copy.copy(self)  # the rows are checked and normalised once
        object.__setattr__(design, "constraints", (*self.constraints, constraint))
        return design

    def _tokens(self, tokens: Tokens) -> np.ndarray:
        several = list(tokens) if isinstance(tokens, Iterable) else [tokens]
        size = len(self.target_probs)
        ids = [_attempts.token_index(token, size) for token in several]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"tokens: must be distinct and at least one; got {tokens!r}")
        return np.array(ids)


@dataclass
class Attempt:
    """An attempt of one solver at a design: the row inside its limits, if any, and its bound."""

    q: np.ndarray  # (m,), on the tokens with q > 0, like p
    p: np.ndarray
    constraints: dict[str, Constraint]
    total: Any  # the cvxpy constraint Σh = 1; None if no solver ran
    status: str
    h: np.ndarray | None
    solver: str
    bound: float = math.inf

    @property
    def row(self) -> np.ndarray:
        """Return h (m,) on the tokens with q > 0; only for an attempt with a row."""
        assert self.h is not None
        return self.h

    @property
    def value(self) -> float:
        """Return Σ min(p, h)."""
        return float(np.minimum(self.p, self.row).sum())

    def broken(self) -> str | None:
        """Return a message that names the first broken constraint, or None."""
        if self.h is None:
            return self.status
        if not abs(self.h.sum() - 1) <= FEASIBILITY:
            return f"{self.status}, but the row sums to {self.h.sum():.9g}"
        for name, constraint in self.constraints.items():
            if not constraint.slack(self.h) >= -FEASIBILITY:
                return f"{self.status}, but {name} is exceeded by {-constraint.slack(self.h):.3g}"
        return None

    def proven(self) -> float:
        """Return the upper bound on the acceptance at the attempt's multipliers."""
        lagrangian = Lagrangian.of(self.q, self.p)
        level = float(np.sum(self.total.dual_value))  # multiplier of Σh = 1
        lagrangian.add_linear(level, row=1.0, right=1.0)
        for constraint in self.constraints.values():
            constraint.charge(lagrangian)
        return lagrangian.bound()


@dataclass
class Program(Attempted[Attempt]):
    """The program of a design; it counts the attempts that a solver called infeasible."""

    q: np.ndarray
    p: np.ndarray
    constraints: Sequence[Constraint]
    infeasible_attempts: int = 0

    promise = f"the row must meet every constraint within {FEASIBILITY:g}, and its bound"

    @property
    def linear(self) -> bool:
        """Return whether the program is linear, so that a simplex method can solve it."""
        return all(each.linear for each in self.constraints)

    @property
    def guess(self) -> np.ndarray:
        """Return a positive guess of the row, which scales the variables: the clipped draft row."""
        q, inside = self.q, self.q > 0
        # limits and floors have an entry for each token, ceilings only where q > 0
        ceiling = np.ones(int(inside.sum()))
        floor, limit = np.zeros_like(q), np.ones_like(q)
        for constraint in self.constraints:
            if isinstance(constraint, BudgetConstraint):
                raised = raised_ceiling(q[inside], constraint.kind, constraint.delta)
                ceiling = np.minimum(ceiling, raised)
            if isinstance(constraint, LimitConstraint) and constraint.sign > 0:
                limit[constraint.tokens] = np.minimum(limit[constraint.tokens], constraint.limit)
            elif isinstance(constraint, LimitConstraint):
                floor[constraint.tokens] = np.maximum(floor[constraint.tokens], constraint.limit)
        guess = np.minimum(np.clip(self.p[inside], q[inside], ceiling), limit[inside])
        return np.maximum(np.maximum(guess, floor[inside]), SMALLEST_SCALE * q[inside])

    def build(self, scale: np.ndarray) -> tuple[Scaled, dict[str, Constraint]]:
        """Return the row for one scale, and the constraints on it by name."""
        w, inside = cvxpy().Variable(len(scale), nonneg=True), self.q > 0
        row = Scaled(self.q[inside], scale, w)
        return row, {each.name: each.placed(row, inside) for each in self.constraints}

    def attempt(self, scale: np.ndarray, solver: _attempts.Solver) -> Attempt:
        """Return one solver's attempt, with a row or only with a status."""
        cp, (row, built), p = cvxpy(), self.build(scale), self.p[self.q > 0]
        total = row.total == 1
        limits = [total, *(c for each in built.values() for c in each.constraints)]
        accepted = scale @ cp.minimum(p / scale, row.w)  # Σ min(p, h), as h = scale∘w
        problem = cp.Problem(cp.Maximize(accepted), limits)
        solved = _attempts.believable(problem, *solver) and total.dual_value is not None
        h = _cleaned(scale * row.w.value, row.q, built) if solved else None
        status = problem.status or "no answer"
        return Attempt(row.q, p, built, total, status=status, h=h, solver=solver[0])

    def fault(self, answer: Attempt) -> str | None:
        """Return why a row is not accepted, or None; set the row's bound."""
        self.infeasible_attempts += "infeasible" in answer.status
        broken = answer.broken()
        if broken:
            return broken
        answer.bound = answer.proven()
        return unproven(answer.status, answer.value, answer.bound)

    def rescaled(self, answer: Attempt | None, scale: np.ndarray) -> np.ndarray:
        """Return the attempt's row as the next scale; without a row, the mean √(``scale`` · q)."""
        q = self.q[self.q > 0]
        guess = np.sqrt(scale * q) if answer is None or answer.h is None else answer.h
        return np.maximum(guess, SMALLEST_SCALE * q)

    def conflict(self) -> list[str]:
        """Return names of constraints in conflict: if any one is dropped, the others can be met.

        Each constraint in turn is dropped if the remaining ones are infeasible without it.
        """
        left = list(self.constraints)
        for each in self.constraints:
            fewer = [other for other in left if other is not each]
            # without any constraint there is always a row
            if fewer and Program(self.q, self.p, fewer)._impossible():
                left = fewer
        return [each.name for each in left]

    def _impossible(self) -> bool:
        return "infeasible" in self.attempt(self.guess, self.solvers[0]).status


def _cleaned(raw: np.ndarray, q: np.ndarray, constraints: dict[str, Constraint]) -> np.ndarray:
    """Return the row ``raw`` moved inside its limits, with sum 1 if a few rescalings suffice."""
    box = Lagrangian.of(q, q)  # only its ``low`` and ``high`` are used here
    for constraint in constraints.values():
        if isinstance(constraint, LimitConstraint):
            constraint.charge(box)
    # if limits contradict each other the lower one counts, and checks of the answer refuse the row
    h = np.clip(raw, box.low, np.maximum(box.low, box.high))
    for _ in range(POLISHING):
        between = (h > box.low) & (h < box.high)
        mass = h[between].sum()
        if mass <= 0:
            break
        h[between] *= (1 - h[~between].sum()) / mass
        h = np.clip(h, box.low, np.maximum(box.low, box.high))
    return h


def _solved(q: np.ndarray, p: np.ndarray, constraints: Sequence[Constraint]) -> DesignedRow:
    """Return the best row with its proof; raise Infeasible with the constraints in conflict."""
    started = time.perf_counter()
    program = Program(q, p, constraints)
    # a budget of 0 forces h = q
    forced = [c for c in constraints if isinstance(c, BudgetConstraint) and c.delta == 0]
    try:
        answer = _lossless(program, forced[0]) if forced else program.solve(program.guess)
    except SolverGaveUp:
        # a badly scaled attempt may be called infeasible, two with different scales are believed
        if program.infeasible_attempts > 1:
            raise Infeasible(program.conflict()) from None
        raise
    h, target, value = answer.row, np.zeros_like(q), answer.value
    target[q > 0] = h
    # with a budget of 0 no solver ran, so there are no dual values
    duals = {
        name: math.nan if forced else constraint.price(h)
        for name, constraint in answer.constraints.items()
    }
    return DesignedRow(
        target=target,
        acceptance=value,
        lossless=float(np.minimum(p, q).sum()),
        slacks={name: each.slack(h) for name, each in answer.constraints.items()},
        duals=duals,
        **_attempts.proof_of(answer, value, started),
    )


def _lossless(program: Program, zero_budget: BudgetConstraint) -> Attempt:
    """Return h = q, the only row within a budget of 0, if it meets the other constraints."""
    inside = program.q > 0
    q, p = program.q[inside], program.p[inside]
    _, built = program.build(q)
    answer = Attempt(q, p, built, total=None, status="exact", h=q, solver="identity")
    broken = [name for name, each in built.items() if each.slack(q) < -FEASIBILITY]
    if broken:
        raise Infeasible([zero_budget.name, broken[0]])
    answer.bound = answer.value
    return answer
