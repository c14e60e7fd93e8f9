"""Solve a design, prove the answer, or name the constraints that cannot be kept together."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _program
from ._constraints import (
    BudgetConstraint,
    Built,
    Constraint,
    CustomConstraint,
    Dual,
    LimitConstraint,
)
from ._program import FEASIBILITY, OPTIMALITY, SMALLEST_SCALE, SolverGaveUp
from ._quantities import Quantities
from ._scaled import Scaled, cvxpy
from ._separable import Lagrangian
from .per_proposal import raised_ceiling

if TYPE_CHECKING:
    from .design import DesignedRow

# rounds of rescaling the entries between their limits, once the others are set to theirs
POLISHING = 8
# a price below this, relative to the largest of a design (or to 1), is a solver's noise
NOISE = 1e-6


class Infeasible(ValueError):
    """No row keeps all constraints; ``constraints`` names a smallest set of them in conflict.

    ``rules`` is the older name of the same.
    """

    def __init__(self, constraints: Sequence[str]) -> None:
        self.constraints = self.rules = tuple(constraints)
        super().__init__(f"constraints: no row keeps all of: {'; '.join(self.constraints)}")


@dataclass(frozen=True)
class _Attempt:
    """A program in one scaling, solved or not, with its row cleaned."""

    of: Quantities
    constraints: dict[str, Built]
    total: Any
    status: str
    h: np.ndarray | None
    solver: str


def _scale(q: np.ndarray, p: np.ndarray, constraints: Sequence[Constraint]) -> np.ndarray:
    """Return a guess of the row's size: the draft, kept between the target and the limits."""
    inside = q > 0
    ceiling = np.ones(int(inside.sum()))
    floor, limit = np.zeros_like(q), np.ones_like(q)
    for each in constraints:
        if isinstance(each, BudgetConstraint):
            ceiling = np.minimum(ceiling, raised_ceiling(q[inside], each.kind, each.delta))
        if isinstance(each, LimitConstraint) and each.sign > 0:
            limit[each.tokens] = np.minimum(limit[each.tokens], each.limit)
        elif isinstance(each, LimitConstraint):
            floor[each.tokens] = np.maximum(floor[each.tokens], each.limit)
    guess = np.minimum(np.clip(p[inside], q[inside], ceiling), limit[inside])
    return np.maximum(np.maximum(guess, floor[inside]), SMALLEST_SCALE * q[inside])


def _attempt(
    q: np.ndarray,
    p: np.ndarray,
    constraints: Sequence[Constraint],
    scale: np.ndarray,
    how: tuple[str, dict],
) -> _Attempt:
    cp = cvxpy()
    of = Quantities(q, p, Scaled(q[q > 0], scale, cp.Variable(len(scale), nonneg=True)))
    built = {each.name: each.build(of) for each in constraints}
    total = of.row.total == 1
    limits = [total, *(c for each in built.values() for c in each.constraints)]
    problem = cp.Problem(cp.Maximize(of.acceptance), limits)
    found = _program.believable(problem, *how) and total.dual_value is not None
    h = _cleaned(scale * of.row.w.value, q[q > 0], built) if found else None
    return _Attempt(of, built, total, problem.status or "no answer", h, how[0])


def _cleaned(raw: np.ndarray, q: np.ndarray, constraints: dict[str, Built]) -> np.ndarray:
    """Return the row inside its limits to the last digit, summing to 1 up to rounding."""
    box = Lagrangian.of(q, q)
    for built in constraints.values():
        if isinstance(getattr(built, "wanted", None), LimitConstraint):
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


def _fault(attempt: _Attempt) -> str | None:
    """Return which constraint the attempt's row breaks, if any."""
    h = attempt.h
    if h is None:
        return attempt.status
    if not abs(h.sum() - 1) <= FEASIBILITY:
        return f"{attempt.status}, but the row sums to {h.sum():.9g}"
    for name, each in attempt.constraints.items():
        if not each.slack(h) >= -FEASIBILITY:
            return f"{attempt.status}, but {name} is exceeded by {-each.slack(h):.3g}"
    return None


def _bound(attempt: _Attempt) -> float:
    """Return the upper bound at the attempt's multipliers, ∞ where a constraint has no tangent."""
    of, h = attempt.of, attempt.h
    assert h is not None
    lagrangian = Lagrangian.of(of.row.q, of.p[of.inside])
    lagrangian.add_linear(float(np.sum(attempt.total.dual_value)), 1.0, 1.0)
    if not all([each.charge(lagrangian, h) for each in attempt.constraints.values()]):
        return math.inf
    bound = lagrangian.bound()
    return bound if math.isfinite(bound) else math.inf


def _value(attempt: _Attempt) -> float:
    assert attempt.h is not None
    return float(np.minimum(attempt.of.p[attempt.of.inside], attempt.h).sum())


def solve(q: np.ndarray, p: np.ndarray, constraints: Sequence[Constraint]) -> dict[str, Any]:
    """Return the fields of a solved design; see :meth:`solvers.design.Design.solve`."""
    started = time.perf_counter()
    zero = [c for c in constraints if isinstance(c, BudgetConstraint) and c.delta == 0]
    if zero:
        return _lossless(q, p, constraints, zero[0], started)
    faults, refused, earlier = [], 0, None
    scale = _scale(q, p, constraints)
    for how in _program.attempts(all(each.linear for each in constraints)):
        attempt = _attempt(q, p, constraints, scale, how)
        fault = _fault(attempt)
        refused += "infeasible" in attempt.status
        if fault is None:
            value, bound = _value(attempt), _bound(attempt)
            if abs(bound - value) <= OPTIMALITY:
                return _fields(attempt, bound, "dual bound", started)
            again = earlier is not None and abs(value - earlier) <= OPTIMALITY
            custom = any(isinstance(each, CustomConstraint) for each in constraints)
            if again and bound > value and custom:
                return _fields(attempt, max(value, earlier or 0.0), "two scalings", started)
            fault = f"{attempt.status}, but {value:.9g} misses its bound {bound:.9g}"
            earlier = value
        faults.append(f"{how[0]}: {fault}")
        # the next attempt is scaled by this answer, or half way to the target if there was none
        inside = q[q > 0]
        guess = np.sqrt(scale * inside) if attempt.h is None else attempt.h
        scale = np.maximum(guess, SMALLEST_SCALE * inside)
    if refused > 1:
        raise Infeasible(_conflict(q, p, list(constraints)))
    raise SolverGaveUp(
        f"solver: the row must keep every constraint within {FEASIBILITY:g} and meet its bound "
        f"within {OPTIMALITY:g}; got {'; '.join(faults)}"
    )


def _lossless(
    q: np.ndarray,
    p: np.ndarray,
    constraints: Sequence[Constraint],
    zero: BudgetConstraint,
    started: float,
) -> dict[str, Any]:
    """Return h = q, the only row within a budget of 0, if it keeps the other constraints."""
    row = Scaled(q[q > 0], q[q > 0], cvxpy().Variable(int((q > 0).sum())))
    slacks = {each.name: each.build(Quantities(q, p, row)).slack(row.q) for each in constraints}
    broken = [name for name, slack in slacks.items() if slack < -FEASIBILITY]
    if broken:
        raise Infeasible([zero.name, broken[0]])
    value = float(np.minimum(p, q).sum())
    return {
        "target": q, "acceptance": value, "lossless": value, "slacks": slacks,
        "duals": dict.fromkeys(slacks, math.nan), "bound": value, "gap": 0.0,
        "proof": "only row", "solver": "identity", "status": "exact",
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _fields(attempt: _Attempt, bound: float, proof: str, started: float) -> dict[str, Any]:
    of, h = attempt.of, attempt.h
    assert h is not None
    target, value = np.zeros_like(of.q), _value(attempt)
    target[of.inside] = h
    return {
        "target": target, "acceptance": value, "lossless": float(np.minimum(of.p, of.q).sum()),
        "slacks": {name: each.slack(h) for name, each in attempt.constraints.items()},
        "duals": _prices({name: each.price(h) for name, each in attempt.constraints.items()}),
        "bound": bound, "gap": bound - value, "proof": proof,
        "solver": attempt.solver, "status": attempt.status,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _prices(duals: dict[str, Dual]) -> dict[str, Dual]:
    """Return the prices with those that are noise beside the others set to 0."""
    every = [abs(price) for dual in duals.values() for price in _single(dual)]
    least = NOISE * max(1.0, *every) if every else 0.0

    def clean(price: float) -> float:
        return price if abs(price) > least else 0.0

    return {
        name: {token: clean(price) for token, price in dual.items()}
        if isinstance(dual, dict)
        else clean(dual)
        for name, dual in duals.items()
    }


def _single(dual: Dual) -> list[float]:
    return list(dual.values()) if isinstance(dual, dict) else [dual]


def _conflict(q: np.ndarray, p: np.ndarray, constraints: list[Constraint]) -> list[str]:
    """Return a smallest set in conflict, by leaving out every constraint that can be left out."""
    for each in list(constraints):
        fewer = [other for other in constraints if other is not each]
        if fewer and _impossible(q, p, fewer):
            constraints = fewer
    return [each.name for each in constraints]


def _impossible(q: np.ndarray, p: np.ndarray, constraints: Sequence[Constraint]) -> bool:
    """Return whether the solver finds no row that keeps them all."""
    how = _program.attempts(all(each.linear for each in constraints))[0]
    attempt = _attempt(q, p, constraints, _scale(q, p, constraints), how)
    return "infeasible" in attempt.status


def report(row: "DesignedRow") -> str:
    """Return a design in plain text: what it reaches, the proof, and one line a constraint."""
    lines = [
        f"acceptance  {row.acceptance:.9g}   (lossless {row.lossless:.9g})",
        f"proof       {row.proof}, {row.bound:.9g} at most; gap {row.gap:.1e}",
        f"solver      {row.solver}, {row.status}, {row.seconds:.3f} s",
    ]
    width = max((len(name) for name in row.slacks), default=0)
    for name, slack in row.slacks.items():
        state = "binds" if any(_single(row.duals[name])) else f"slack {slack:.4g}"
        lines.append(f"constraint  {name:<{width}}  {state:<16}  {_priced(row.duals[name])}")
    return "\n".join(lines)


def _priced(dual: Dual) -> str:
    if not isinstance(dual, dict):
        return f"price {dual:.6g}"
    paying = {token: price for token, price in dual.items() if price}
    top = sorted(paying, key=paying.__getitem__, reverse=True)[:4]
    shown = ", ".join(f"{paying[token]:.4g} at {token}" for token in top)
    more = f" and {len(paying) - len(top)} more" if len(paying) > len(top) else ""
    return f"price {shown}{more}" if paying else "price 0"
