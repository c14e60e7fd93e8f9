r"""The optimal program: the best acceptance of any row within the budget.

.. math:: A(δ) = \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \in Δ,\; D(h\|q) \le δ

The closed form of :func:`cactus_theory.optimal_acceptance` is tested against this program. Prior
art for reverse KL: mentored decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv 2609.30474).
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence

from . import _attempts, _row_program
from .per_proposal import raised_ceiling

SUPPORTS = ("target", "free")


@dataclass(frozen=True)
class OptimalProgram:
    """The solution of the optimal program: the row h, its acceptance, and the proof."""

    target: np.ndarray  # (V,) float64, the row h to verify against instead of q
    acceptance: float  # Σ min(p, h), the probability of accepting the drafted token
    divergence: float  # D(h‖q) spent, in the divergence's unit (nats for KL)
    price: float  # dA/dδ, from the dual value of the budget
    bound: float  # proven upper bound on the acceptance
    gap: float  # bound minus acceptance
    solver: str  # the solver; ``identity`` if none was needed
    status: str  # the solver's status
    seconds: float  # wall time, building the program included


def solve(
    target_probs: Any,
    draft_probs: Any,
    divergence: str | Divergence = "kl",
    *,
    delta: float,
    support: str = "target",
) -> OptimalProgram:
    r"""Maximise acceptance under a bound on D(h‖q), by a conic or linear solver.

    .. math:: \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \ge 0,\; Σ h = 1,\; D(h\|q) \le δ

    Every answer is checked: the row must satisfy the budget within 1e-7, and the acceptance must
    be within 1e-6 of an upper bound from the solver's dual values. Variables are scaled by
    s = clip(p, q, γ), where γ_i is the most mass that a row within the budget can put on token i.
    δ = 0 gives h = q without a solver; δ = ∞ drops the budget.

    Parameters
    ----------
    target_probs, draft_probs : (V,) probabilities q and p of one dtype; they may miss 1 by
        the dtype's tolerance and are divided by their float64 sum.
    divergence : spec string (``kl``, ``renyi:a=2``, …) or a Divergence.
    delta : budget ≥ 0 (nats for KL), possibly infinite.
    support : ``target`` keeps h = 0 where q = 0; ``free`` allows mass there, which costs f′(∞)
        per unit (f is the generator) and is split in proportion to p.

    Raises
    ------
    ValueError
        Not a distribution, more than one row, a negative budget, an unknown divergence.
    SolverGaveUp, ModuleNotFoundError
        No answer passed the check; cvxpy is missing.
    """
    started = time.perf_counter()
    q, p = _attempts.one_pair(target_probs, draft_probs)
    kind, delta = _attempts.checked_budget(divergence, delta)
    check.one_of("support", support, SUPPORTS)
    inside = q > 0
    outside = float(p[~inside].sum())
    f = kind.generator
    affordable = f is not None and math.isfinite(f.slope_at_infinity)
    free = support == "free" and outside > 0 and affordable
    target = q.copy()
    if delta == 0:
        answer = _row_program.forced(q, p, _row_program.lossless_price(q, p, kind, free))
    else:
        cap, zero_cap = p[inside], outside if free else None
        scale = np.clip(cap, q[inside], raised_ceiling(q[inside], kind, delta))
        answer = _row_program.RowProgram(kind, delta, q[inside], cap, zero_cap).solve(scale)
        target[inside] = answer.h
        if free:
            target[~inside] = p[~inside] * (answer.z / outside)
    proof = _attempts.proof_of(answer, answer.value, started)
    return OptimalProgram(target, answer.value, answer.divergence, answer.price, **proof)
