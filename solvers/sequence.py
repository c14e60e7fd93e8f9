r"""The sequence program: one budget split over many positions.

.. math:: \max_{h_1 … h_T} Σ_t Σ_i \min(p_{ti}, h_{ti}) \;\text{ s.t. }\; h_t \in Δ,\;
   Σ_t D(h_t\|q_t) \le Δ

At the optimum all positions that can still gain have the same price; this is why a band of
constant price is the best way to spend a budget. The program does not assume it.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory.divergences import Divergence, FDivergence
from solvers import _program, _rows
from solvers._dual import lagrange_bound
from solvers._left_sides import left_side
from solvers._program import FEASIBILITY, OPTIMALITY, SMALLEST_SCALE, SolverGaveUp
from solvers._scaled import Scaled, cvxpy
from solvers.per_proposal import raised_ceiling


@dataclass(frozen=True)
class SequenceProgram:
    """A solved sequence program.

    Attributes
    ----------
    target : (T, V) float64, the row to verify against at each position.
    acceptance, divergence : (T,) what each position accepts and spends.
    total_acceptance, total_divergence : their sums.
    price : d(total acceptance)/dΔ, the dual value of the one budget; inf at Δ = 0 where
        something could be gained.
    bound, gap : proven upper bound on the total acceptance, and bound minus it.
    solver, status, seconds : what solved it, what it said, wall time.
    """

    target: np.ndarray
    acceptance: np.ndarray
    divergence: np.ndarray
    total_acceptance: float
    total_divergence: float
    price: float
    bound: float
    gap: float
    solver: str
    status: str
    seconds: float


@dataclass(frozen=True)
class _Position:
    """One position without the tokens that its target excludes."""

    q: np.ndarray
    p: np.ndarray


def solve(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
) -> SequenceProgram:
    r"""Maximise the sum of acceptances under one budget on the sum of divergences.

    The answer is checked, not trusted: the rows satisfy the budget within 1e-7 and the total
    meets a bound from the solver's own dual values within 1e-6. Tokens with q = 0 get
    nothing. Δ = 0 is h = q and needs no solver; Δ = ∞ drops the budget. Meant for small T
    and V: one cone a token.

    Parameters
    ----------
    target_probs, draft_probs : (T, V) probabilities of one dtype, a position a row.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    delta : the total budget Δ ≥ 0, in the divergence's unit (nats for KL).

    Raises
    ------
    ValueError
        Not (T, V) rows of probabilities, a negative budget, or a Rényi or max-divergence:
        their sums over positions are no convex budget on the rows.
    SolverGaveUp
        No answer passed its own check.
    """
    started = time.perf_counter()
    rows = check.probability_rows(target_probs, draft_probs)
    q, p = (row.cpu().numpy().copy() for row in rows)
    if q.ndim != 2 or not len(q):
        raise ValueError(f"target_probs: must be rows (T, V); got {check.describe(rows[0])}")
    asked, delta = _rows.budget(divergence, delta)
    kind = asked.generator
    if kind is None or not asked.additive:
        raise ValueError(f"divergence: must be an f-divergence to be summed; got {asked.spec!r}")
    if delta == 0:
        price = max(_rows.lossless_price(*pair, kind) for pair in zip(q, p, strict=True))
        accepted = float(np.minimum(q, p).sum())
        return _finished(q, q, p, kind, (price, accepted, "identity", "exact"), started)
    positions = [_Position(a[a > 0], b[a > 0]) for a, b in zip(q, p, strict=True)]
    inside, labels = _solve(positions, kind, delta)
    target = np.zeros_like(q)
    target[q > 0] = np.concatenate(inside)
    return _finished(target, q, p, kind, labels, started)


_Labels = tuple[float, float, str, str]


def _solve(
    positions: list[_Position], kind: FDivergence, delta: float
) -> tuple[list[np.ndarray], _Labels]:
    """Return the rows with price, bound, solver and status of the first accepted attempt."""
    scales = [np.clip(at.p, at.q, raised_ceiling(at.q, kind, delta)) for at in positions]
    faults = []
    for how in _program.attempts(kind.linear or math.isinf(delta)):
        found = _attempt(positions, scales, kind, delta, how)
        fault = "no answer" if found is None else _fault(positions, *found, kind, delta)
        if found is not None and fault is None:
            return found
        faults.append(f"{how[0]}: {fault}")
        rows = [at.q for at in positions] if found is None else found[0]
        scales = [
            np.maximum(h, SMALLEST_SCALE * at.q) for h, at in zip(rows, positions, strict=True)
        ]
    raise SolverGaveUp(
        f"solver: the rows must satisfy their budget within {FEASIBILITY:g} and meet their dual "
        f"bound within {OPTIMALITY:g}; got {'; '.join(faults)}"
    )


def _attempt(
    positions: list[_Position],
    scales: list[np.ndarray],
    kind: FDivergence,
    delta: float,
    how: tuple[str, dict],
) -> tuple[list[np.ndarray], _Labels] | None:
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


def _fault(
    positions: list[_Position],
    rows: list[np.ndarray],
    labels: _Labels,
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


def _finished(
    target: np.ndarray,
    q: np.ndarray,
    p: np.ndarray,
    kind: FDivergence,
    labels: _Labels,
    started: float,
) -> SequenceProgram:
    price, bound, solver, status = labels
    kept = np.minimum(target, p).sum(-1)
    spent = np.array(
        [_program.divergence_of(kind, h, row) for h, row in zip(target, q, strict=True)]
    )
    return SequenceProgram(
        target,
        kept,
        spent,
        float(kept.sum()),
        float(spent.sum()),
        price,
        bound,
        bound - float(kept.sum()),
        solver,
        status,
        time.perf_counter() - started,
    )
