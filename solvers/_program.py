"""Run a convex program and accept its answer only if its own dual values prove it."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cactus_theory.divergences import Divergence

from . import _conic
from ._dual import lagrange_bound
from ._scaled import Scaled, cvxpy

# Interior-point answers are good to about 1e-9; the row may overspend by this, in D's unit.
FEASIBILITY = 1e-7
# An answer further than this below its own dual bound is not called optimal.
OPTIMALITY = 1e-6

# A failed attempt's answer scales the next one, but no token below this share of q.
SMALLEST_SCALE = 1e-6

# Tight first: the gap then stays near 1e-10. Rows that stall there may pass at the defaults.
_TIGHT = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10, "max_iter": 200}
# Shorter steps stay away from the cones' boundaries, and the strategy changes before steps shrink
# to nothing. That is no slower, and rows of a real model that end in numerical trouble at the
# solver's own settings (about one in ten) are solved.
_CAREFUL = {**_TIGHT, "max_step_fraction": 0.9, "min_switch_step_length": 0.02}
_VERY_CAREFUL = {**_TIGHT, "max_step_fraction": 0.8, "equilibrate_enable": False}


class SolverGaveUp(RuntimeError):
    """No attempt returned a row that is feasible and meets its dual bound."""


@dataclass(frozen=True)
class Program:
    """Maximise ``objective`` over rows h with D(h‖q) ≤ δ.

    Attributes
    ----------
    kind, delta : the budget, in the divergence's unit (nats for KL).
    q, cap : (m,) the target on tokens with q > 0 and the caps c of the reward Σ min(c, h).
    zero_cap : reward available on tokens with q = 0, None if no mass may go there.
    objective : the reward as a cvxpy expression of the scaled row.
    """

    kind: Divergence
    delta: float
    q: np.ndarray
    cap: np.ndarray
    objective: Callable[[Scaled], Any]
    zero_cap: float | None = None


@dataclass(frozen=True)
class Answer:
    """A checked solution: h (m,) where q > 0, mass z where q = 0, and its proof."""

    h: np.ndarray
    z: float
    value: float
    divergence: float
    price: float
    bound: float
    solver: str
    status: str


def divergence_of(kind: Divergence, h: np.ndarray, q: np.ndarray, z: float = 0.0) -> float:
    """Return D(h‖q) of a row with mass z on tokens with q = 0."""
    if z > 0:
        h, q = np.append(h, z), np.append(q, 0.0)
    return float(kind.value(torch.from_numpy(h), torch.from_numpy(q)))


def believable(problem: Any, solver: str, options: dict) -> bool:
    """Solve ``problem`` silently; return whether it has values that can be checked."""
    cp = cvxpy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an inaccurate status: the answer is checked
            problem.solve(solver=solver, **options)
    except (cp.SolverError, ArithmeticError, ValueError):
        return False
    return all(
        variable.value is not None and np.isfinite(variable.value).all()
        for variable in problem.variables()
    )


def attempts(linear: bool) -> list[tuple[str, dict]]:
    """Return solvers to try in turn; linear programs go to a simplex method first."""
    interior = [("CLARABEL", how) for how in (_CAREFUL, _VERY_CAREFUL, _TIGHT, {})]
    return [("HIGHS", {}), *interior] if linear else interior


def _run(program: Program, scale: np.ndarray, solver: str, options: dict) -> Answer | None:
    """Return one solver's cleaned answer with its bound, or None if it has none."""
    cp = cvxpy()
    w = cp.Variable(len(scale), nonneg=True)
    z: Any = 0.0 if program.zero_cap is None else cp.Variable(nonneg=True)
    row = Scaled(program.q, scale, w, z)
    budget = _conic.budget(row, program.kind, program.delta)
    total = row.total == 1
    problem = cp.Problem(cp.Maximize(program.objective(row)), [*budget.constraints, total])
    if not believable(problem, solver, options) or total.dual_value is None:
        return None
    outside = 0.0 if program.zero_cap is None else float(z.value)
    return _assess(program, scale * w.value, outside, budget, total, (solver, problem.status))


def _assess(
    program: Program,
    raw: np.ndarray,
    outside: float,
    budget: _conic.Budget,
    total: Any,
    labels: tuple[str, str],
) -> Answer:
    """Clip and renormalise the row, then measure it and bound it from the duals."""
    h, z = np.maximum(raw, 0.0), max(outside, 0.0)
    mass = h.sum() + z
    h, z = h / mass, z / mass
    value = float(np.minimum(program.cap, h).sum()) + min(program.zero_cap or 0.0, z)
    bound = lagrange_bound(
        program.kind,
        program.q,
        program.cap,
        program.delta,
        (budget.slope, budget.level(total)),
        program.zero_cap,
    )
    spent = divergence_of(program.kind, h, program.q, z)
    return Answer(h, z, value, spent, budget.price, bound, *labels)


def _fault(answer: Answer | None, delta: float) -> str | None:
    """Return why an answer is not accepted."""
    if answer is None:
        return "no answer"
    if not answer.divergence <= delta + FEASIBILITY:
        return f"{answer.status}, but D = {answer.divergence:.9g} exceeds {delta:.9g}"
    if not abs(answer.bound - answer.value) <= OPTIMALITY:
        return f"{answer.status}, but {answer.value:.9g} misses its bound {answer.bound:.9g}"
    return None


def solve(program: Program, scale: np.ndarray) -> Answer:
    """Return the first answer that is feasible within 1e-7 and meets its bound within 1e-6.

    ``scale`` (m,) is a positive guess of the size of h; it changes how well the solver works,
    not the optimum.

    Raises
    ------
    SolverGaveUp
        No attempt passed its own check.
    ModuleNotFoundError
        cvxpy is missing.
    """
    faults = []
    linear = program.kind.linear or math.isinf(program.delta)
    for solver, options in attempts(linear):
        answer = _run(program, scale, solver, options)
        fault = _fault(answer, program.delta)
        if answer is not None and fault is None:
            return answer
        faults.append(f"{solver}: {fault}")
        # the next attempt is scaled by this answer, or by q if there was none
        scale = program.q if answer is None else np.maximum(answer.h, SMALLEST_SCALE * program.q)
    raise SolverGaveUp(
        f"solver: the answer must satisfy its budget within {FEASIBILITY:g} and meet its dual "
        f"bound within {OPTIMALITY:g}; got {'; '.join(faults)}"
    )
