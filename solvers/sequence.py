r"""The sequence program: one budget split over many positions.

.. math:: \max_{h_1 … h_T} Σ_t Σ_i \min(p_{ti}, h_{ti}) \;\text{ s.t. }\; h_t \in Δ,\;
   Σ_t D(h_t\|q_t) \le Δ

At the optimum all positions that can still gain have the same price; this is why a band of
constant price is the best way to spend a budget. ``solve`` finds the price from the Lagrange
dual, at any size; ``program`` hands everything to a conic solver, which assumes nothing.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory.divergences import Divergence, FDivergence

from . import _program, _rows, _sequence_dual
from ._program import SolverGaveUp
from .per_proposal import raised_ceiling

# entries that the conic solver takes for a check: about two seconds
CHECKED_ENTRIES = 2000


@dataclass(frozen=True)
class SequenceProgram:
    """A solved sequence program.

    Attributes
    ----------
    target : (T, V) float64, the row to verify against at each position.
    acceptance, divergence : (T,) what each position accepts and spends.
    total_acceptance, total_divergence : their sums.
    price : d(total acceptance)/dΔ, the multiplier of the one budget; inf at Δ = 0 where
        something could be gained.
    bound, gap : proven upper bound on the total acceptance, and bound minus it.
    solver, status : what solved it (``lagrange dual``, ``identity`` or a solver of cvxpy) and
        what it said.
    seconds : wall time.
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
class CheckedSequence(SequenceProgram):
    """A sequence program with what cvxpy says to it.

    Attributes
    ----------
    program : the total acceptance of the conic solver, or why there is none.
    """

    program: float | str


def solve(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
) -> SequenceProgram:
    r"""Maximise the sum of acceptances under one budget on the sum of divergences.

    By the Lagrange dual, at any size: V = 151,936 is a matter of memory. The answer is checked,
    not trusted: the rows satisfy the budget within 1e-7 and the total meets its dual bound within
    1e-6 (in practice 1e-12). Tokens with q = 0 get nothing. Δ = 0 is h = q; total variation, which
    has no price, and Δ = ∞ are linear programs.

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
    q, p, kind, delta = _arguments(target_probs, draft_probs, divergence, delta)
    if delta == 0 or math.isinf(delta) or not kind.smooth:
        return _by_program(q, p, kind, delta, started)
    target, price, levels = _sequence_dual.solve(q, p, kind, delta)
    asked = _flat(q, p, kind, delta)
    found = asked.assessed(target[q > 0], 0.0, (price, levels), price, ("lagrange dual", "proven"))
    fault = asked.fault(found)
    if fault is not None:
        raise asked.gave_up(f"{found.solver}: {fault}")
    return _finished(target, q, p, kind, found, started)


def program(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
) -> SequenceProgram:
    """Solve the same by a conic or linear solver, for small T and V: one cone a token.

    Nothing of the dual's closed suprema enters but the bound that the answer has to meet.
    Arguments, answer and errors as for :func:`solve`.
    """
    started = time.perf_counter()
    return _by_program(*_arguments(target_probs, draft_probs, divergence, delta), started)


def checked(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
    entries: int = CHECKED_ENTRIES,
) -> CheckedSequence:
    """Return the answer of :func:`solve`, beside that of :func:`program` up to ``entries`` T·V.

    A program that has no answer says so in ``program``; the answer and its proof stand.
    """
    found = solve(target_probs, draft_probs, divergence, delta=delta)
    said: float | str = f"not solved: more than {entries} entries"
    if found.target.size <= entries:
        try:
            said = program(target_probs, draft_probs, divergence, delta=delta).total_acceptance
        except SolverGaveUp as error:
            said = f"gave up: {error}"
    return CheckedSequence(**vars(found), program=said)


def _arguments(
    target_probs: Any, draft_probs: Any, divergence: str | Divergence, delta: float
) -> tuple[np.ndarray, np.ndarray, FDivergence, float]:
    rows = check.probability_rows(target_probs, draft_probs)
    q, p = (row.cpu().numpy().copy() for row in rows)
    if q.ndim != 2 or not len(q):
        raise ValueError(f"target_probs: must be rows (T, V); got {check.describe(rows[0])}")
    kind, delta = _rows.budget(divergence, delta)
    return q, p, _rows.additive(kind), delta


def _flat(q: np.ndarray, p: np.ndarray, kind: FDivergence, delta: float) -> _program.Program:
    """Return the program of all positions, without the tokens that a target excludes."""
    inside = q > 0
    return _program.Program(kind, delta, q[inside], p[inside], position=np.nonzero(inside)[0])


def _by_program(
    q: np.ndarray, p: np.ndarray, kind: FDivergence, delta: float, started: float
) -> SequenceProgram:
    asked = _flat(q, p, kind, delta)
    if delta == 0:
        price = max(_rows.lossless_price(*pair, kind) for pair in zip(q, p, strict=True))
        accepted = float(np.minimum(q, p).sum())
        answer = _program.Answer(q, 0.0, accepted, 0.0, price, accepted, "identity", "exact")
        return _finished(q, q, p, kind, answer, started)
    scale = np.clip(asked.cap, asked.q, raised_ceiling(asked.q, kind, delta))
    answer, target = asked.solve(scale), np.zeros_like(q)
    target[q > 0] = answer.h
    return _finished(target, q, p, kind, answer, started)


def _finished(
    target: np.ndarray,
    q: np.ndarray,
    p: np.ndarray,
    kind: FDivergence,
    answer: _program.Answer,
    started: float,
) -> SequenceProgram:
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
        answer.price,
        answer.bound,
        answer.bound - float(kept.sum()),
        answer.solver,
        answer.status,
        time.perf_counter() - started,
    )
