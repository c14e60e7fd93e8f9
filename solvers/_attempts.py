"""Check the arguments of programs, run them, and accept answers only if dual values prove them.

All programs are solved by the one loop of :class:`Attempted`: solvers are tried in turn, each in
variables scaled by what the one before it found, until an answer passes the program's own check.
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

# Most divergence above the budget, in D's unit; interior-point answers are good to about 1e-9.
FEASIBILITY = 1e-7
# Most gap below its own dual bound of an answer that is called optimal.
OPTIMALITY = 1e-6

# Least scale of a token, as a share of q, taken from a failed attempt's answer.
SMALLEST_SCALE = 1e-6

# Largest gap, as a share of the price, at which a sum over positions is not solved again at the
# scale of the rows found: a price is as accurate as its bound is tight (a gap of 4e-7 left a price
# 0.2 % off).
SHARP = 1e-7

# Tight first: the gap then stays near 1e-10. Rows that stall there may pass at the defaults.
_TIGHT = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10, "max_iter": 200}
# Shorter steps stay away from the cones' boundaries, and the strategy changes before steps shrink
# to nothing. That is no slower, and rows of a real model that end in numerical trouble at the
# solver's own settings (about one in ten) are solved.
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
    """Return an f-divergence, whose values may be summed over rows."""
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
    """Return the slope of the best Σ min(p, h) at δ = 0, where h = q; 0 if nothing is gained.

    Where p > q > 0 the first bit of divergence has an infinite price, as f is flat at 1. Mass
    on tokens with q = 0, if ``free``, costs f′(∞) − f′(1) each.
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
    # mass taken away where h < q has the left slope at 1, half a kink below slope_at_one
    price = one / (f.slope_at_infinity - f.slope_at_one + f.kink / 2)
    return float(kind.price_from_generator(price, zero))


def forced(q: np.ndarray, cap: np.ndarray, price: float) -> "Answer":
    """Return the answer h = q, where nothing else is allowed."""
    value = float(np.minimum(cap, q).sum())
    return Answer(q, 0.0, value, 0.0, price, value, "identity", "exact")


class SolverGaveUp(RuntimeError):
    """No attempt returned a row that is feasible and meets its dual bound."""


def unproven(status: str, value: float, bound: float) -> str | None:
    """Return why a value is not called optimal, None if it meets its bound."""
    if abs(bound - value) <= OPTIMALITY:
        return None
    return f"{status}, but {value:.9g} misses its bound {bound:.9g}"


def proof_of(answer: Any, value: float, started: float) -> dict[str, Any]:
    """Return the fields of a result that prove it: bound, gap, solver, status, seconds."""
    fields = {name: getattr(answer, name) for name in ("bound", "solver", "status")}
    return fields | {"gap": answer.bound - value, "seconds": time.perf_counter() - started}


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


# cvxpy's name of a solver, and its options
Solver = tuple[str, dict[str, Any]]
Solution = TypeVar("Solution")


class Attempted(Generic[Solution]):
    """A program that solvers try in turn, each answer being checked."""

    promise: str = ""  # the conditions on an answer, for the error message

    @property
    def linear(self) -> bool:
        return False

    @property
    def solvers(self) -> list[Solver]:
        """Return solvers to try in turn; linear programs go to a simplex method first."""
        interior = [("CLARABEL", options) for options in (_CAREFUL, _VERY_CAREFUL, _TIGHT, {})]
        return [("HIGHS", {}), *interior] if self.linear else interior

    def attempt(self, scale: np.ndarray, solver: Solver) -> Solution | None:
        """Return one solver's cleaned answer with its bound, or None if it has none."""
        raise NotImplementedError

    def fault(self, answer: Solution) -> str | None:
        """Return why an answer is not accepted, None if it is."""
        raise NotImplementedError

    def rescaled(self, answer: Solution | None, scale: np.ndarray) -> np.ndarray:
        """Return the scale after an attempt that failed: its answer, or q if there was none."""
        raise NotImplementedError

    def solve(self, scale: np.ndarray) -> Solution:
        """Return the first answer that keeps its promise within 1e-7, and its bound within 1e-6.

        ``scale`` (m,) is a positive guess of the size of h; it changes how well the solver
        works, not the optimum. Raises SolverGaveUp if no attempt passed its own check.
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
    """A checked solution: h (m,) where q > 0, mass z where q = 0, and its proof."""

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
    """Maximise Σ min(c, h) over rows h with D(h‖q) ≤ δ; or over several rows that share δ.

    ``q`` and ``cap`` (m,) are the target on tokens with q > 0 and the caps c of the reward.
    """

    kind: Divergence
    delta: float  # in the divergence's unit (nats for KL)
    q: np.ndarray
    cap: np.ndarray
    zero_cap: float | None = None  # reward on tokens with q = 0, None if no mass may go there
    position: np.ndarray | None = None  # (m,) the row of each token, from 0; None for one row
    promise: str = (
        f"the answer must satisfy its budget within {FEASIBILITY:g} and meet its dual bound"
    )

    @property
    def linear(self) -> bool:
        return self.kind.linear or math.isinf(self.delta)

    def attempt(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        """Return one solver's answer; of positions the sharper of two if the first is blunt."""
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
        own = self.position  # the tokens of each row sum to 1
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
        """Return Σ min(c, h), which is h_n if there is one row and c is one-hot."""
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
        """Measure a row and bound it from the multipliers λ of the budget and μ of each Σh = 1."""
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
