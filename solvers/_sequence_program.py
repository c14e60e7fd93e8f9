"""The sequence program as cvxpy solves it: all positions at once, one cone a token."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.divergences import FDivergence

from . import _program
from ._dual import lagrange_bound
from ._left_sides import left_side
from ._program import FEASIBILITY, OPTIMALITY, SMALLEST_SCALE, SolverGaveUp
from ._scaled import Scaled, cvxpy
from .per_proposal import raised_ceiling


@dataclass(frozen=True)
class Position:
    """One position without the tokens that its target excludes."""

    q: np.ndarray
    p: np.ndarray


# price, bound, solver, status
Labels = tuple[float, float, str, str]
Found = tuple[list[np.ndarray], Labels]
# a price is the multiplier of a bound, and as good as the bound is tight: a gap above this share
# of the price is worth another attempt, at the scale of the rows found (4e-7 left a price .2 % off)
SHARP = 1e-7


def solve(positions: list[Position], kind: FDivergence, delta: float) -> Found:
    """Return the rows with price, bound, solver and status of the first accepted attempt.

    Once more from there if the price is small, so that it has as many digits as a large one.

    Raises
    ------
    SolverGaveUp
        No attempt passed its own check.
    """
    scales = [np.clip(at.p, at.q, raised_ceiling(at.q, kind, delta)) for at in positions]
    faults = []
    for how in _program.attempts(kind.linear or math.isinf(delta)):
        found = _attempt(positions, scales, kind, delta, how)
        fault = "no answer" if found is None else fault_of(positions, *found, kind, delta)
        scales = _scales(positions, [at.q for at in positions] if found is None else found[0])
        if found is not None and fault is None:
            if _gap(positions, found) > SHARP * found[1][0]:
                again = _attempt(positions, scales, kind, delta, how)
                if again is not None and fault_of(positions, *again, kind, delta) is None:
                    return min(found, again, key=lambda own: _gap(positions, own))
            return found
        faults.append(f"{how[0]}: {fault}")
    raise SolverGaveUp(
        f"solver: the rows must satisfy their budget within {FEASIBILITY:g} and meet their dual "
        f"bound within {OPTIMALITY:g}; got {'; '.join(faults)}"
    )


def _scales(positions: list[Position], rows: list[np.ndarray]) -> list[np.ndarray]:
    pairs = zip(rows, positions, strict=True)
    return [np.maximum(h, SMALLEST_SCALE * at.q) for h, at in pairs]


def _gap(positions: list[Position], found: Found) -> float:
    """Return how far the value is from its bound, on either side."""
    rows, (_, bound, *_) = found
    pairs = zip(positions, rows, strict=True)
    return abs(bound - sum(float(np.minimum(at.p, h).sum()) for at, h in pairs))


def _attempt(
    positions: list[Position],
    scales: list[np.ndarray],
    kind: FDivergence,
    delta: float,
    how: tuple[str, dict],
) -> Found | None:
    cp = cvxpy()
    rows = [
        Scaled(at.q, scale, cp.Variable(len(scale), nonneg=True))
        for at, scale in zip(positions, scales, strict=True)
    ]
    kept = [
        row.s @ cp.minimum(at.p / row.s, row.w) for at, row in zip(positions, rows, strict=True)
    ]
    totals = [row.total == 1 for row in rows]
    spent: list[Any] = (
        [] if math.isinf(delta) else [sum(left_side(row, kind) for row in rows) <= delta]
    )
    problem = cp.Problem(cp.Maximize(sum(kept)), [*spent, *totals])
    if not _program.believable(problem, *how) or any(t.dual_value is None for t in totals):
        return None
    raw = [np.maximum(row.s * row.w.value, 0.0) for row in rows]
    price = max(0.0, float(np.sum(spent[0].dual_value))) if spent else 0.0
    bound = price * delta if price else 0.0
    for at, total in zip(positions, totals, strict=True):
        bound += lagrange_bound(kind, at.q, at.p, 0.0, (price, float(total.dual_value)))
    return [h / h.sum() for h in raw], (price, bound, how[0], problem.status)


def fault_of(
    positions: list[Position],
    rows: list[np.ndarray],
    labels: Labels,
    kind: FDivergence,
    delta: float,
) -> str | None:
    """Return why an answer is not accepted."""
    pairs = list(zip(positions, rows, strict=True))
    spent = sum(_program.divergence_of(kind, h, at.q) for at, h in pairs)
    value = sum(float(np.minimum(at.p, h).sum()) for at, h in pairs)
    _, bound, _, status = labels
    if not spent <= delta + FEASIBILITY:
        return f"{status}, but the total of {spent:.9g} exceeds {delta:.9g}"
    if not abs(bound - value) <= OPTIMALITY:
        return f"{status}, but {value:.9g} misses its bound {bound:.9g}"
    return None
