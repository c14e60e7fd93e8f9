r"""The program of regret: the best acceptance of any row whose mean regret is within a budget.

.. math:: \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \in Δ,\; Σ_i h_i ρ_i \le δ,\quad
   ρ_i = \max \ln q − \ln q_i

It is linear, and the reference that the closed form is tested against (THEORY.md, Theorem 30).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check

from . import _attempts

# least tolerances of the solver: at its own, 1e-7, it spends on tokens of little regret
TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


@dataclass(frozen=True)
class RegretProgram:
    """A solved program of regret."""

    target: np.ndarray  # (V,) float64, the row h to verify against
    acceptance: float  # Σ min(p, h)
    regret: float  # Σ h ρ spent, in nats
    price: float  # dA/dδ, from the dual value of the budget


def solve(target_probs: Any, draft_probs: Any, *, delta: float) -> RegretProgram:
    r"""Maximise acceptance under a bound on the mean regret, by a linear solver.

    Parameters
    ----------
    target_probs, draft_probs : (V,) probabilities, as for :func:`solvers.optimal.solve`.
    delta : budget ≥ 0 in nats, possibly infinite.

    Raises
    ------
    ValueError
        Not a distribution, more than one row, a negative budget.
    SolverGaveUp, ModuleNotFoundError
        The solver found no optimum; scipy is missing.
    """
    optimize = check.optional_module("scipy.optimize", "solvers")
    q, p = _attempts.one_pair(target_probs, draft_probs)
    delta = check.number("delta", delta, 0.0, math.inf)
    inside = q > 0
    lost, drafted = np.log(q[inside].max()) - np.log(q[inside]), p[inside]
    size, none = len(lost), np.zeros(len(lost))
    # variables: t ≤ min(p, h), and h
    each = np.eye(size)
    rules, limits = np.hstack([each, -each]), none
    if delta < math.inf:
        rules, limits = np.vstack([rules, np.append(none, lost)]), np.append(none, delta)
    found = optimize.linprog(
        np.append(none - 1, none), rules, limits, np.append(none, none + 1)[None], [1.0],
        [*((0, cap) for cap in drafted), *((0, None) for _ in lost)], options=TIGHT,
    )  # fmt: skip
    if found.status:
        raise _attempts.SolverGaveUp(found.message)
    target = np.zeros_like(q)
    target[inside] = h = found.x[size:]
    price = -float(found.ineqlin.marginals[size]) if delta < math.inf else 0.0
    return RegretProgram(target, -float(found.fun), float(h @ lost), price)
