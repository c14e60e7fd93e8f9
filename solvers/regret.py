r"""The program of regret: the best acceptance of any row whose mean regret is within a budget.

.. math:: \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \in Δ,\; Σ_i h_i ρ_i \le δ,\quad
   ρ_i = \max \ln q − \ln q_i

The program is linear; the closed form is tested against it (THEORY.md, Theorem 30).
"""

import math
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check

from . import _attempts

# tightest tolerances of the solver: at its 1e-7 default, rows overspend on tokens of low regret
TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


def solve(target_probs: Any, draft_probs: Any, *, delta: float) -> tuple[np.ndarray, float]:
    """Solve the program of regret; return the row h (V,) and its acceptance.

    Rows and errors are as for :func:`solvers.optimal.solve`; ``delta`` is in nats of regret,
    possibly infinite.
    """
    optimize = check.optional_module("scipy.optimize", "solvers")
    q, p = _attempts.one_pair(target_probs, draft_probs)
    inside, size = q > 0, int((q > 0).sum())
    regret = np.log(q[inside].max()) - np.log(q[inside])
    # no row has more regret than −ln min q; the solver must not read ∞
    budget = min(check.number("delta", delta, 0.0, math.inf), -math.log(q[inside].min()))
    zeros, ones, unit = np.zeros(size), np.ones(size), np.eye(size)
    # the variables are (t, h), with t ≤ p by its bounds
    solution = optimize.linprog(
        c=np.r_[-ones, zeros],  # maximise Σ t
        A_ub=np.vstack([np.hstack([unit, -unit]), np.r_[zeros, regret]]),  # t ≤ h, Σ h ρ ≤ δ
        b_ub=np.r_[zeros, budget],
        A_eq=[np.r_[zeros, ones]],  # Σ h = 1
        b_eq=[1.0],
        bounds=[(0, cap) for cap in p[inside]] + [(0, None)] * size,
        options=TIGHT,
    )
    if solution.status:
        raise _attempts.SolverGaveUp(solution.message)
    target = np.zeros_like(q)
    target[inside] = solution.x[size:]
    return target, -float(solution.fun)
