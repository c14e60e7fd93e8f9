r"""The sequence program: one budget split over many positions.

.. math:: \max_{h_1 … h_T} Σ_t Σ_i \min(p_{ti}, h_{ti}) \;\text{ s.t. }\; h_t \in Δ,\;
   Σ_t D(h_t\|q_t) \le Δ

At the optimum all positions that can still gain have the same price; this is why a band of
constant price is the best way to spend a budget. ``solve`` finds the price from the Lagrange
dual, at any size; ``program`` hands everything to a conic solver, which assumes nothing.

The dual is two nested roots, at any size:

.. math:: \min_{λ \ge 0, μ} λΔ + Σ_t \Big( μ_t + Σ_i \sup_h
   [\min(p_{ti}, h) − λ q_{ti} f(h/q_{ti}) − μ_t h] \Big)

Each supremum is at h = q clip(p/q, a, b) with f′(a) = −μ/λ and f′(b) = (1 − μ)/λ. So μ_t is the
root of Σ h = 1, which rises in a, and λ that of Σ D = Δ, which falls in λ. The rows found are
feasible and their value meets the bound of :mod:`solvers._dual`, which proves them.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence

from . import _program
from ._dual import halved
from ._program import FEASIBILITY, SolverGaveUp
from .per_proposal import raised_ceiling

# entries that the conic solver takes for a check: about two seconds
CHECKED_ENTRIES = 2000
# a is searched for in [e^−700, 1]: so many halvings leave its relative error at rounding
LOWEST_LOG, HALVINGS = -700.0, 64
# ln λ is searched for between these: every row is then at one of its ends, up to rounding
PRICES = (-40.0, 40.0)
# of ln λ; the value is flat there, to second order
PRICE_ACCURACY = 1e-13


@dataclass(frozen=True)
class SequenceProgram:
    """A solved sequence program.

    ``price`` is d(total acceptance)/dΔ, the multiplier of the one budget; inf at Δ = 0 where
    something could be gained.
    """

    target: np.ndarray  # (T, V) float64, the row to verify against at each position
    acceptance: np.ndarray  # (T,) what each position accepts
    divergence: np.ndarray  # (T,) what each position spends
    total_acceptance: float
    total_divergence: float
    price: float
    bound: float  # proven upper bound on the total acceptance
    gap: float  # bound minus total acceptance
    solver: str  # ``lagrange dual``, ``identity`` or a solver of cvxpy
    status: str  # what it said
    seconds: float  # wall time


@dataclass(frozen=True)
class CheckedSequence(SequenceProgram):
    """A sequence program with what cvxpy says to it."""

    program: float | str  # the total acceptance of the conic solver, or why there is none


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
    target, price, levels = _by_dual(q, p, kind, delta)
    joint, labels = _joint_program(q, p, kind, delta), ("lagrange dual", "proven")
    answer = joint.assessed(target[q > 0], 0.0, (price, levels), price, labels)
    fault = joint.fault(answer)
    if fault is not None:
        raise joint.gave_up(f"{answer.solver}: {fault}")
    return _finished(target, q, p, kind, answer, started)


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
    answer = solve(target_probs, draft_probs, divergence, delta=delta)
    total: float | str = f"not solved: more than {entries} entries"
    if answer.target.size <= entries:
        try:
            total = program(target_probs, draft_probs, divergence, delta=delta).total_acceptance
        except SolverGaveUp as error:
            total = f"gave up: {error}"
    return CheckedSequence(**vars(answer), program=total)


def _arguments(
    target_probs: Any, draft_probs: Any, divergence: str | Divergence, delta: float
) -> tuple[np.ndarray, np.ndarray, FDivergence, float]:
    rows = check.probability_rows(target_probs, draft_probs)
    q, p = (row.cpu().numpy().copy() for row in rows)
    if q.ndim != 2 or not len(q):
        raise ValueError(f"target_probs: must be rows (T, V); got {check.describe(rows[0])}")
    kind, delta = _program.checked_budget(divergence, delta)
    return q, p, _program.additive(kind), delta


def _joint_program(
    q: np.ndarray, p: np.ndarray, kind: FDivergence, delta: float
) -> _program.Program:
    """Return the program of all positions, without the tokens that a target excludes."""
    inside = q > 0
    promise = f"the rows must satisfy their budget within {FEASIBILITY:g} and meet their dual bound"
    position = np.nonzero(inside)[0]
    return _program.Program(kind, delta, q[inside], p[inside], position=position, promise=promise)


def _by_program(
    q: np.ndarray, p: np.ndarray, kind: FDivergence, delta: float, started: float
) -> SequenceProgram:
    if delta == 0:
        price = max(_program.lossless_price(*pair, kind) for pair in zip(q, p, strict=True))
        accepted = float(np.minimum(q, p).sum())
        answer = _program.Answer(q, 0.0, accepted, 0.0, price, accepted, "identity", "exact")
        return _finished(q, q, p, kind, answer, started)
    joint, target = _joint_program(q, p, kind, delta), np.zeros_like(q)
    answer = joint.solve(np.clip(joint.cap, joint.q, raised_ceiling(joint.q, kind, delta)))
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
    totals = float(kept.sum()), float(spent.sum())
    proof = answer.price, answer.bound, answer.bound - totals[0], answer.solver, answer.status
    return SequenceProgram(target, kept, spent, *totals, *proof, time.perf_counter() - started)


def _by_dual(
    q: np.ndarray, p: np.ndarray, f: FDivergence, delta: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """Return rows (T, V), the price λ and levels μ (T,), for rows q, p (T, V) and 0 < Δ < ∞."""
    optimize = check.optional_module("scipy.optimize", "solvers")
    target, draft = torch.from_numpy(q), torch.from_numpy(p)

    excesses: dict[float, float] = {}

    def excess(log_price: float) -> float:
        rows, _ = _at_price(target, draft, f, math.exp(log_price))
        excesses[log_price] = float(f.value(rows, target).sum()) - delta
        return excesses[log_price]

    if excess(PRICES[0]) <= 0:
        rows, _ = _at_price(target, draft, f, math.exp(PRICES[0]))
        return rows.numpy(), 0.0, np.zeros(len(q))
    optimize.brentq(excess, *PRICES, xtol=PRICE_ACCURACY)
    # of the two ends of the last bracket the one within the budget: at a tiny price a row's
    # last digit is worth much divergence, and the other end may spend 1e-9 too much
    price = math.exp(max((value, log) for log, value in excesses.items() if value <= 0)[1])
    rows, levels = _at_price(target, draft, f, price)
    return rows.numpy(), price, levels.numpy()


def _at_price(q: Tensor, p: Tensor, f: FDivergence, price: float) -> tuple[Tensor, Tensor]:
    """Return h (T, V) with Σ h = 1, and μ (T,), at a price."""
    inside = q > 0
    ratio = torch.where(inside, p / torch.where(inside, q, 1.0), 0.0)

    def short(log: Tensor) -> Tensor:
        return (q * _clipped(ratio, log.exp(), f, price)).sum(-1, keepdim=True) < 1

    low = torch.full_like(q[:, :1], LOWEST_LOG)
    edge = halved(low, torch.zeros_like(low), short, HALVINGS)[1].exp()
    rows = q * _clipped(ratio, edge, f, price)
    return rows / rows.sum(-1, keepdim=True), -price * f.slope(edge[:, 0])


def _clipped(ratio: Tensor, lower: Tensor, f: FDivergence, price: float) -> Tensor:
    upper = f.ratio_at(f.slope(lower) + 1 / price)
    return torch.minimum(torch.maximum(ratio, lower), upper)
