r"""The Cactus program: given one drafted token, raise it as far as the budget allows.

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

from . import _attempts
from ._conic import generator_budget, most_of
from ._dual_bounds import halved

# Bisection in log γ starts from at most 700 nats: 40 halvings leave a factor below 1 + 1e-9.
SCALE_HALVINGS = 40


@dataclass(frozen=True)
class PerProposalProgram:
    """A solved per-proposal program."""

    target: np.ndarray  # (V,) float64, the row h to verify the drafted token against
    raised: float  # γ = h_n
    divergence: float  # D(h‖q) spent, in the divergence's unit (nats for KL)
    price: float  # dγ/dδ, the dual value of the budget; inf at δ = 0 where h = q is forced
    bound: float  # proven upper bound on γ, from the solver's dual values
    solver: str  # the solver; ``identity`` if none was needed
    seconds: float


def raised_ceiling(q: np.ndarray, kind: Divergence, delta: float) -> np.ndarray:
    r"""Return an upper bound on h_i over all rows within the budget, tight to a few digits.

    By symmetry and convexity the other tokens keep their proportions, so that γ solves
    :math:`q_n f(γ/q_n) + (1-q_n) f((1-γ)/(1-q_n)) = δ`; for all tokens (V,) at once, by halving
    the bracket [q, 1] in log γ and keeping its upper end. Only used to scale variables.
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

    The answer is checked, not trusted: its row satisfies the budget within 1e-7 and its
    value meets a bound from the solver's own dual values within 1e-6. The two-point
    reduction enters only as the scale of the variables. δ = 0, q_n = 0 and q_n = 1 leave
    h = q and need no solver.

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
        No answer passed its own check.
    """
    started = time.perf_counter()
    q, _ = _attempts.one_pair(target_probs, target_probs)
    kind, delta = _attempts.checked_budget(divergence, delta)
    token = _attempts.token_index(token, len(q))
    target, inside, reward = q.copy(), q > 0, np.arange(len(q)) == token
    if delta == 0 or q[token] in (0.0, 1.0):
        cap = reward * 1.0
        answer = _attempts.forced(q, cap, _attempts.lossless_price(q, cap, kind))
    else:
        scale = np.where(reward[inside], raised_ceiling(q[inside], kind, delta), q[inside])
        answer = _attempts.Program(kind, delta, q[inside], reward[inside] * 1.0).solve(scale)
        target[inside] = answer.h
    proof = answer.divergence, answer.price, float(answer.bound), answer.solver
    seconds = time.perf_counter() - started
    return PerProposalProgram(target, float(target[token]), *proof, seconds)
