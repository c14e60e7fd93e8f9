"""The program of one row in cvxpy: max Σ min(c, h) within a budget of divergence.

:mod:`solvers.optimal`, :mod:`solvers.per_proposal` and :mod:`solvers.sequence` solve this program.
The cap c is the draft row, or 1 at one token; several rows may share the budget.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cactus_theory.divergences import Divergence

from . import _attempts, _divergence_budget
from ._attempts import FEASIBILITY, SMALLEST_SCALE, Attempted, Solver, unproven
from ._dual_bounds import lagrange_bound
from ._perspective import Scaled, counted, cvxpy

# A program with several positions is solved again, at the scale of the rows found, if its gap
# exceeds this share of the price: the price is only as accurate as the bound is tight (a gap of
# 4e-7 left a price 0.2 % off).
SHARP = 1e-7


def lossless_price(q: np.ndarray, p: np.ndarray, kind: Divergence, free: bool = False) -> float:
    """Return dA/dδ at δ = 0 (h = q) for the best acceptance A; 0 if nothing can be gained.

    If p > q > 0 for some token, the slope is 1 over the kink of the generator f at 1, the jump of
    f′ there, or infinite if f has no kink. With ``free``, mass on tokens with q = 0 costs
    f′(∞) − f′(1) a unit. A divergence without a generator bounds h/q by c(δ), and has the slope
    c′(0) Σ_{p>q} q.
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
    return Answer(
        h=q,
        z=0.0,
        value=value,
        divergence=0.0,
        price=price,
        bound=value,
        solver="identity",
        status="exact",
    )


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
class RowProgram(Attempted[Answer]):
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

        If several rows share the budget and the gap to the bound is large, solve again at the scale
        of the first answer, and return the answer with the smaller gap.
        """
        first = self._once(scale, solver)
        if first is None or self.position is None or abs(first.gap) <= SHARP * first.price:
            return first
        second = self._once(self.rescaled(first, scale), solver) if not self.fault(first) else None
        if second is None or self.fault(second):
            return first
        return min(first, second, key=lambda answer: abs(answer.gap))

    def _once(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        """Return one solver's answer, with rows divided by their sums; None without an answer."""
        cp = cvxpy()
        z: Any = 0.0 if self.zero_cap is None else cp.Variable(nonneg=True)
        row = Scaled(self.q, scale, cp.Variable(len(scale), nonneg=True), z)
        budget = _divergence_budget.budget(row, self.kind, self.delta)
        if self.position is None:
            total = row.total
        else:  # each of the rows must sum to 1
            total = counted(self.position, np.arange(len(self.position))) @ row.h
        sums_to_one = total == 1
        reward = self._kept(row) + (0 if self.zero_cap is None else cp.minimum(z, self.zero_cap))
        problem = cp.Problem(cp.Maximize(reward), [*budget.constraints, sums_to_one])
        if not _attempts.believable(problem, *solver) or sums_to_one.dual_value is None:
            return None
        h = np.maximum(row.s * row.w.value, 0.0)
        z = max(float(getattr(z, "value", z)), 0.0)  # a variable, or the number 0
        positions = self._positions
        mass = np.bincount(positions, h) + z
        multipliers = budget.slope, sums_to_one.dual_value + budget.tilt * budget.slope
        labels = solver[0], problem.status
        return self.assessed(h / mass[positions], z / mass[0], multipliers, budget.price, labels)

    @property
    def _positions(self) -> np.ndarray:
        return np.zeros(len(self.q), dtype=int) if self.position is None else self.position

    def _kept(self, row: Scaled) -> Any:
        """Return Σ min(c, h) for cvxpy; for one row and a c that is one-hot at n, this is h_n."""
        certain = np.flatnonzero(self.cap >= 1)
        if len(certain) and self.position is None:
            return row.s[certain] @ row.w[certain]
        return row.s @ cvxpy().minimum(self.cap / row.s, row.w)

    def assessed(
        self,
        h: np.ndarray,
        z: float,
        multipliers: tuple[float, np.ndarray | float],
        price: float,
        labels: tuple[str, str],
    ) -> Answer:
        """Return the answer h, z with its bound at the multipliers λ (budget) and μ (Σh = 1)."""
        value = float(np.minimum(self.cap, h).sum()) + min(self.zero_cap or 0.0, z)
        bound = lagrange_bound(
            self.kind,
            self.q,
            self.cap,
            delta=self.delta,
            multipliers=multipliers,
            zero_cap=self.zero_cap,
            position=self._positions,
        )
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
