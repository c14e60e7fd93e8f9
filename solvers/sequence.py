r"""The sequence program: one budget split over many positions.

.. math:: \max_{h_1 … h_T} Σ_t Σ_i \min(p_{ti}, h_{ti}) \;\text{ s.t. }\; h_t \ge 0,\;
   Σ_i h_{ti} = 1,\; Σ_t D(h_t\|q_t) \le Δ

At the optimum all positions that can still gain have the same price, which is why a band of
constant price is the best way to spend a budget. The program does not assume equal prices, so it is
an independent test of :func:`cactus_theory.pooled_acceptance`, which assumes equal prices.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import tensors
from cactus_theory.divergences import Divergence

from . import _attempts, _row_program
from ._attempts import FEASIBILITY
from .per_proposal import raised_ceiling


@dataclass(frozen=True)
class SequenceProgram:
    """The solution of the sequence program: rows, acceptances, and the proof.

    ``price`` is d(total acceptance)/dΔ, the multiplier of the budget; inf at Δ = 0 if acceptance
    can be gained.
    """

    target: np.ndarray  # (T, V) float64, the row to verify against at each position
    acceptance: np.ndarray  # (T,) Σ min(p, h) at each position
    divergence: np.ndarray  # (T,) D(h‖q) at each position
    total_acceptance: float
    total_divergence: float
    price: float
    bound: float  # proven upper bound on the total acceptance
    gap: float  # bound minus total acceptance
    solver: str  # the solver; ``identity`` if none was needed
    status: str  # the solver's status
    seconds: float  # wall time


def solve(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
) -> SequenceProgram:
    r"""Maximise the sum of acceptances under one budget on the sum of divergences.

    Every answer is checked: the rows must satisfy the budget within 1e-7, and the total must be
    within 1e-6 of an upper bound from the solver's dual values. Tokens with q = 0 get no mass. The
    program has one cone for each token and takes two seconds for 2,000 tokens. Δ = 0 gives h = q
    without a solver; total variation and Δ = ∞ are linear programs.

    Parameters
    ----------
    target_probs, draft_probs : (T, V) probabilities of one dtype, one row for each position.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    delta : the total budget Δ ≥ 0, in the divergence's unit (nats for KL).

    Raises
    ------
    ValueError
        Not (T, V) rows of probabilities, a negative budget, or a Rényi or max-divergence, whose
        sum over positions is not a convex budget.
    SolverGaveUp, ModuleNotFoundError
        No answer passed the check; cvxpy is missing.
    """
    started = time.perf_counter()
    rows = tensors.probability_rows(target_probs, draft_probs)
    q, p = (row.cpu().numpy().copy() for row in rows)
    if q.ndim != 2 or not len(q):
        raise ValueError(f"target_probs: must be rows (T, V); got {tensors.describe(rows[0])}")
    kind, delta = _attempts.checked_budget(divergence, delta)
    kind = _attempts.additive(kind)
    target, inside = q.copy(), q > 0
    if delta == 0:
        price = max(_row_program.lossless_price(*pair, kind) for pair in zip(q, p, strict=True))
        answer = _row_program.forced(q, p, price)
    else:
        promise = f"the rows must satisfy their budget within {FEASIBILITY:g} and meet their bound"
        position = np.nonzero(inside)[0]  # the row t of each token with q > 0
        joint = _row_program.RowProgram(
            kind, delta, q[inside], p[inside], position=position, promise=promise
        )
        scale = np.clip(p[inside], q[inside], raised_ceiling(q[inside], kind, delta))
        answer = joint.solve(scale)
        target[inside] = answer.h
    acceptance = np.minimum(target, p).sum(-1)
    spent = [_row_program.divergence_of(kind, h, row) for h, row in zip(target, q, strict=True)]
    total = float(acceptance.sum())
    return SequenceProgram(
        target=target,
        acceptance=acceptance,
        divergence=np.array(spent),
        total_acceptance=total,
        total_divergence=float(np.sum(spent)),
        price=answer.price,
        **_attempts.proof_of(answer, total, started),
    )
