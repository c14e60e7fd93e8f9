r"""The Cactus program: the largest probability that the budget allows for one drafted token n.

.. math:: γ = \max_h h_n \;\text{ s.t. }\; h \in Δ,\; D(h\|q) \le δ

Source: Hao & Mou 2026 (arXiv 2604.04987), who pose it for f-divergences.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.divergences import Divergence

from . import _attempts, _row_program
from ._divergence_budget import generator_budget, most_of
from ._dual_bounds import halved

# The bracket of log γ is at most 700 nats wide: 40 halvings leave γ exact to a factor 1 + 1e-9.
SCALE_HALVINGS = 40


@dataclass(frozen=True)
class PerProposalProgram:
    """The solution of the Cactus program: the row h, the raised probability γ, and the proof."""

    target: np.ndarray  # (V,) float64, the row h to verify the drafted token against
    raised: float  # γ = h_n
    divergence: float  # D(h‖q) spent, in the divergence's unit (nats for KL)
    price: float  # dγ/dδ, the dual value of the budget; inf at δ = 0 where h = q is forced
    bound: float  # proven upper bound on γ, from the solver's dual values
    solver: str  # the solver; ``identity`` if none was needed
    seconds: float


def raised_ceiling(q: np.ndarray, kind: Divergence, delta: float) -> np.ndarray:
    r"""Return for each token n an upper bound on h_n over all rows h within the budget.

    The largest h_n is reached when all other tokens keep their proportions (by symmetry and
    convexity), so γ solves :math:`q_n f(γ/q_n) + (1-q_n) f((1-γ)/(1-q_n)) = δ_f`, with the
    generator f and its sum δ_f at the budget. The left side rises in γ, so the bracket [q, 1] is
    halved in log γ, for all tokens (V,) at once. The upper end is returned, which keeps the bound
    valid. The bounds are only used to scale variables.
    """
    if math.isinf(delta):
        return np.ones_like(q)
    f = kind.generator
    if f is None:
        return np.minimum(1.0, most_of(kind, delta) * q)
    amount = generator_budget(kind, delta)
    target = torch.from_numpy(q)

    def within(log: Tensor) -> Tensor:
        return f.two_points(log.exp(), target)[0] <= amount

    ends = target.log(), torch.zeros_like(target)
    return halved(*ends, within, SCALE_HALVINGS)[1].exp().numpy()


def solve(
    target_probs: Any,
    token: int,
    *,
    divergence: str | Divergence = "kl",
    delta: float,
) -> PerProposalProgram:
    r"""Solve the Cactus program over the whole simplex by a conic solver.

    .. math:: \max_h h_n \;\text{ s.t. }\; h \ge 0,\; Σ h = 1,\; D(h\|q) \le δ,\; h ≪ q

    Every answer is checked: the row must satisfy the budget within 1e-7, and γ must be within 1e-6
    of an upper bound from the solver's dual values. The reduction to two points
    (:func:`raised_ceiling`) only scales the variables. δ = 0, q_n = 0 and q_n = 1 leave h = q and
    need no solver.

    Parameters
    ----------
    target_probs : (V,) probabilities q; they may miss 1 by their dtype's tolerance.
    token : the drafted token n, counted from 0.
    divergence : spec string (``kl``, ``renyi:a=2``, …) or a Divergence.
    delta : budget ≥ 0 (nats for KL), possibly infinite.

    Raises
    ------
    ValueError
        Not a distribution, a token outside the vocabulary, a negative budget.
    SolverGaveUp
        No answer passed the check.
    """
    started = time.perf_counter()
    q, _ = _attempts.one_pair(target_probs, target_probs)
    kind, delta = _attempts.checked_budget(divergence, delta)
    token = _attempts.token_index(token, len(q))
    target, inside, cap = q.copy(), q > 0, np.eye(len(q))[token]
    if delta == 0 or q[token] in (0.0, 1.0):
        answer = _row_program.forced(q, cap, _row_program.lossless_price(q, cap, kind))
    else:
        # only the drafted token rises; q is the scale of all others
        scale = np.where(cap[inside] > 0, raised_ceiling(q[inside], kind, delta), q[inside])
        answer = _row_program.RowProgram(kind, delta, q[inside], cap[inside]).solve(scale)
        target[inside] = answer.h
    return PerProposalProgram(
        target=target,
        raised=float(target[token]),
        divergence=answer.divergence,
        price=answer.price,
        bound=float(answer.bound),
        solver=answer.solver,
        seconds=time.perf_counter() - started,
    )
