"""Check the arguments of programs, solve them, and accept only answers that dual values prove.

All programs share the loop of :class:`Attempted`: solvers are tried in turn until an answer passes
the program's check. Each solver's variables are scaled by the answer of the solver before.
"""

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.divergences import Divergence, FDivergence, read_divergence

from . import _conic
from ._dual_bounds import lagrange_bound
from ._perspective import Scaled, counted, cvxpy

# Most divergence above the budget, in D's unit; interior-point answers are exact to about 1e-9.
FEASIBILITY = 1e-7
# Largest distance from the dual bound at which an answer counts as optimal.
OPTIMALITY = 1e-6

# Least scale of a token, as a share of q, when the scale comes from a failed attempt's answer.
SMALLEST_SCALE = 1e-6

# A program with several positions is solved again, at the scale of the rows found, if its gap
# exceeds this share of the price: the price is only as accurate as the bound is tight (a gap of
# 4e-7 left a price 0.2 % off).
SHARP = 1e-7

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
    """Return the divergence and its budget δ ≥ 0, possibly infinite."""
    return read_divergence(divergence), check.number("delta", delta, 0.0, math.inf)


def additive(divergence: str | Divergence) -> FDivergence:
    """Return a divergence that may be summed over rows; raise ValueError for other divergences."""
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


def lossless_price(q: np.ndarray, p: np.ndarray, kind: Divergence, free: bool = False) -> float:
    """Return dA/dδ at δ = 0 (h = q) for the best acceptance A; 0 if nothing can be gained.

    If p > q > 0 for some token, the slope is infinite for every f that is flat at 1. With ``free``,
    mass on tokens with q = 0 costs f′(∞) − f′(1) per unit.
    """
    raised = (p > q) & (q > 0)
    one, zero = torch.tensor([1.0, 0.0], dtype=torch.float64)
    f = kind.generator
    if f is None:
        return float(kind.ceiling_slope(one)) * float(q[raised].sum())
    if raised.any():
        return 1 / f.kink if f.kink else math.inf
    if not (free and (p[q == 0] > 0).any()):
        return 0.0
    # mass is taken from tokens at h/q = 1, where the left slope is half a kink below slope_at_one
    price = one / (f.slope_at_infinity - f.slope_at_one + f.kink / 2)
    return float(kind.price_from_generator(price, zero))


def forced(q: np.ndarray, cap: np.ndarray, price: float) -> "Answer":
    """Return the answer h = q, for programs that allow no other row."""
    value = float(np.minimum(cap, q).sum())
    return Answer(q, 0.0, value, 0.0, price, value, "identity", "exact")


class SolverGaveUp(RuntimeError):
    """No solver returned a row that is feasible and meets the dual bound."""


def unproven(status: str, value: float, bound: float) -> str | None:
    """Return why a value does not count as optimal, or None if it meets its bound."""
    if abs(bound - value) <= OPTIMALITY:
        return None
    return f"{status}, but {value:.9g} misses its bound {bound:.9g}"


def proof_of(answer: Any, value: float, started: float) -> dict[str, Any]:
    """Return the fields of a result that prove it: bound, gap, solver, status, seconds."""
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
        """Return one solver's cleaned answer with its bound, or None without an answer."""
        raise NotImplementedError

    def fault(self, answer: Solution) -> str | None:
        """Return why an answer is not accepted, or None if it is accepted."""
        raise NotImplementedError

    def rescaled(self, answer: Solution | None, scale: np.ndarray) -> np.ndarray:
        """Return the scale for the next solver: the failed answer, or q without an answer."""
        raise NotImplementedError

    def solve(self, scale: np.ndarray) -> Solution:
        """Return the first answer that meets its constraints within 1e-7 and its bound within 1e-6.

        ``scale`` (m,) is a positive guess of h. A good guess helps the solver, but does not change
        the optimum. Raises SolverGaveUp if no answer passed the check.
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


@dataclass(frozen=True)
class Answer:
    """A solver's answer: h (m,) where q > 0, mass z where q = 0, value, price and bound."""

    h: np.ndarray
    z: float
    value: float
    divergence: float
    price: float
    bound: float
    solver: str
    status: str

    @property
    def gap(self) -> float:
        return self.bound - self.value


@dataclass(frozen=True)
class Program(Attempted[Answer]):
    """The program max Σ min(c, h) with D(h‖q) ≤ δ, for one row or several rows that share δ.

    ``q`` and ``cap`` (m,) are the target and the caps c of the reward, on the tokens with q > 0.
    """

    kind: Divergence
    delta: float  # in the divergence's unit (nats for KL)
    q: np.ndarray
    cap: np.ndarray
    zero_cap: float | None = None  # Σc over tokens with q = 0; None: these have no mass
    position: np.ndarray | None = None  # (m,) the row of each token, from 0; None for one row
    promise: str = (
        f"the answer must satisfy its budget within {FEASIBILITY:g} and meet its dual bound"
    )

    @property
    def linear(self) -> bool:
        return self.kind.linear or math.isinf(self.delta)

    def attempt(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        """Return one solver's answer.

        With several positions and a loose bound, solve twice and return the smaller gap's answer.
        """
        first = self._once(scale, solver)
        if first is None or self.position is None or abs(first.gap) <= SHARP * first.price:
            return first
        second = self._once(self.rescaled(first, scale), solver) if not self.fault(first) else None
        if second is None or self.fault(second):
            return first
        return min(first, second, key=lambda answer: abs(answer.gap))

    def _once(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        cp = cvxpy()
        z: Any = 0.0 if self.zero_cap is None else cp.Variable(nonneg=True)
        row = Scaled(self.q, scale, cp.Variable(len(scale), nonneg=True), z)
        budget = _conic.budget(row, self.kind, self.delta)
        own = self.position  # if there are several rows, each must sum to 1
        total = row.total if own is None else counted(own, np.arange(len(own))) @ row.h
        whole = total == 1
        reward = self._kept(row) + (0 if self.zero_cap is None else cp.minimum(z, self.zero_cap))
        problem = cp.Problem(cp.Maximize(reward), [*budget.constraints, whole])
        if not believable(problem, *solver) or whole.dual_value is None:
            return None
        h, z = np.maximum(row.s * row.w.value, 0.0), max(float(getattr(z, "value", z)), 0.0)
        positions = self._positions
        mass = np.bincount(positions, h) + z
        multipliers = budget.slope, whole.dual_value + budget.tilt * budget.slope
        labels = solver[0], problem.status
        return self.assessed(h / mass[positions], z / mass[0], multipliers, budget.price, labels)

    @property
    def _positions(self) -> np.ndarray:
        return np.zeros(len(self.q), dtype=int) if self.position is None else self.position

    def _kept(self, row: Scaled) -> Any:
        """Return Σ min(c, h), which is simply h_n for one row and a one-hot c."""
        whole = np.flatnonzero(self.cap >= 1)
        if len(whole) and self.position is None:
            return row.s[whole] @ row.w[whole]
        return row.s @ cvxpy().minimum(self.cap / row.s, row.w)

    def assessed(
        self,
        h: np.ndarray,
        z: float,
        multipliers: tuple[float, np.ndarray | float],
        price: float,
        labels: tuple[str, str],
    ) -> Answer:
        """Return the answer of a row, with the bound at the multipliers λ and μ of Σh = 1."""
        value = float(np.minimum(self.cap, h).sum()) + min(self.zero_cap or 0.0, z)
        problem = self.kind, self.q, self.cap, self.delta
        bound = lagrange_bound(*problem, multipliers, self.zero_cap, self._positions)
        spent = divergence_of(self.kind, h, self.q, z)
        return Answer(h, z, value, spent, price, bound, *labels)

    def fault(self, answer: Answer) -> str | None:
        if not answer.divergence <= self.delta + FEASIBILITY:
            spent = "D =" if self.position is None else "the total of"
            return f"{answer.status}, but {spent} {answer.divergence:.9g} exceeds {self.delta:.9g}"
        return unproven(answer.status, answer.value, answer.bound)

    def rescaled(self, answer: Answer | None, scale: np.ndarray) -> np.ndarray:
        return self.q if answer is None else np.maximum(answer.h, SMALLEST_SCALE * self.q)


def divergence_of(kind: Divergence, h: np.ndarray, q: np.ndarray, z: float = 0.0) -> float:
    if z > 0:
        h, q = np.append(h, z), np.append(q, 0.0)
    return float(kind.value(torch.from_numpy(h), torch.from_numpy(q)))
