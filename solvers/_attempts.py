"""Check arguments of convex programs, solve them, and accept only answers proven optimal.

All programs share the loop of :class:`Attempted`: solvers are tried in turn until an answer passes
the program's check against a bound from dual values. Each solver's variables are scaled by the
answer of the previous solver.
"""

import math
import time
import warnings
from typing import Any, Generic, TypeVar

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.divergences import Divergence, FDivergence, read_divergence

from ._perspective import cvxpy

# Most divergence above the budget, in D's unit; interior-point answers are exact to about 1e-9.
FEASIBILITY = 1e-7
# Largest distance from the dual bound at which an answer counts as optimal.
OPTIMALITY = 1e-6

# Least scale of a token, as a share of q, when the scale comes from a failed attempt's answer.
SMALLEST_SCALE = 1e-6

# With tight tolerances the gap stays near 1e-10; rows that stall may pass at the solver's defaults.
_TIGHT = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10, "max_iter": 200}
# Tried first. Shorter steps stay away from the cones' boundaries, and the strategy changes before
# steps shrink to nothing. This takes no longer, and solves the rows of a real model (about one in
# ten) that end in numerical trouble at the solver's default settings.
_CAREFUL = {**_TIGHT, "max_step_fraction": 0.9, "min_switch_step_length": 0.02}
_VERY_CAREFUL = {**_TIGHT, "max_step_fraction": 0.8, "equilibrate_enable": False}


def one_pair(target_probs: Any, draft_probs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a target and a draft row (V,) as float64 numpy, divided by their sums."""
    target, draft = tensors.probability_rows(target_probs, draft_probs)
    if target.ndim != 1:
        raise ValueError(f"target_probs: must be one row (V,); got {tensors.describe(target)}")
    return target.cpu().numpy().copy(), draft.cpu().numpy().copy()


def checked_budget(divergence: str | Divergence, delta: Any) -> tuple[Divergence, float]:
    """Return the divergence that a spec names, and the budget ``delta`` ≥ 0, possibly ∞."""
    return read_divergence(divergence), check.number("delta", delta, 0.0, math.inf)


def additive(divergence: str | Divergence) -> FDivergence:
    """Return an f-divergence that may be summed over rows; raise ValueError for others."""
    kind = read_divergence(divergence)
    if kind.generator is None or not kind.additive:
        raise ValueError(f"divergence: must be an f-divergence to be summed; got {kind.spec!r}")
    return kind.generator


def token_index(token: Any, vocabulary: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        raise TypeError(f"token: must be an integer; got {token!r}")
    if not 0 <= token < vocabulary:
        raise ValueError(f"token: must lie in [0, {vocabulary - 1}]; got {token}")
    return int(token)


class SolverGaveUp(RuntimeError):
    """No solver returned a row that is feasible and meets the dual bound."""


def unproven(status: str, value: float, bound: float) -> str | None:
    """Return why ``value`` is not proven optimal, or None if it is within 1e-6 of ``bound``."""
    if abs(bound - value) <= OPTIMALITY:
        return None
    return f"{status}, but {value:.9g} misses its bound {bound:.9g}"


def proof_of(answer: Any, value: float, started: float) -> dict[str, Any]:
    """Return fields of a result: bound, gap, solver, status, and the seconds since ``started``."""
    fields = {name: getattr(answer, name) for name in ("bound", "solver", "status")}
    return fields | {"gap": answer.bound - value, "seconds": time.perf_counter() - started}


def believable(problem: Any, solver: str, options: dict) -> bool:
    """Solve ``problem`` without warnings; return whether all its variables have finite values."""
    cp = cvxpy()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of inaccuracy: the answer is checked anyway
            problem.solve(solver=solver, **options)
    except (cp.SolverError, ArithmeticError, ValueError):
        return False
    return all(
        variable.value is not None and np.isfinite(variable.value).all()
        for variable in problem.variables()
    )


# cvxpy's name of a solver, and the solver's options
Solver = tuple[str, dict[str, Any]]
Solution = TypeVar("Solution")


class Attempted(Generic[Solution]):
    """A program that several solvers try in turn, until an answer passes the check."""

    promise: str = ""  # the conditions on an answer, for the error message

    @property
    def linear(self) -> bool:
        return False

    @property
    def solvers(self) -> list[Solver]:
        """Return the solvers to try in turn; for a linear program the first is a simplex method."""
        interior = [("CLARABEL", options) for options in (_CAREFUL, _VERY_CAREFUL, _TIGHT, {})]
        return [("HIGHS", {}), *interior] if self.linear else interior

    def attempt(self, scale: np.ndarray, solver: Solver) -> Solution | None:
        """Run one solver on variables scaled by ``scale``; return its answer, or None."""
        raise NotImplementedError

    def fault(self, answer: Solution) -> str | None:
        """Return why an answer is not accepted, or None if it is accepted."""
        raise NotImplementedError

    def rescaled(self, answer: Solution | None, scale: np.ndarray) -> np.ndarray:
        """Return the next solver's scale: from the failed answer, or a default if there is none."""
        raise NotImplementedError

    def solve(self, scale: np.ndarray) -> Solution:
        """Return the first answer that meets its constraints within 1e-7 and its bound within 1e-6.

        ``scale`` (m,) is a positive guess of the m unknown probabilities. A good guess helps the
        solver, but does not change the optimum. Raises SolverGaveUp if no answer passed the check.
        """
        faults = []
        for solver in self.solvers:
            answer = self.attempt(scale, solver)
            fault = "no answer" if answer is None else self.fault(answer)
            if answer is not None and fault is None:
                return answer
            faults.append(f"{solver[0]}: {fault}")
            scale = self.rescaled(answer, scale)
        raise SolverGaveUp(f"solver: {self.promise} within {OPTIMALITY:g}; got {'; '.join(faults)}")
