r"""The theorem of the band in one place: the best acceptance under a budget on the emitted law.

.. math:: \max_h \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

For every divergence :math:`h = \mathrm{clip}(p, aq, bq)` with 0 ≤ a ≤ 1 ≤ b is optimal; the
divergence only decides how far to go along the path of such bands. ``path`` has them sorted by
p/q, ``newton`` finds the edges without a sort, ``geometry`` translates budgets, prices and
certificates, and ``solve`` is the one entry, which the functions below and the policies share.
``soft`` has the bands of p/P at nodes of paths, a row by itself being that of P = 1, and
``soft_row`` keeps or refuses a token of one row without solving. ``pooled`` spends one budget
over rows; ``roots`` has the bracketed searches. ``selection`` has what several drafts offer
together, as one row.
Prior art for reverse KL: mentored decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv
2609.30474).
"""

from cactus_theory.optimum.acceptance import (
    Frontier,
    OptimalAcceptance,
    frontier,
    optimal_acceptance,
)
from cactus_theory.optimum.pooled import (
    PooledAcceptance,
    PooledFrontier,
    pooled_acceptance,
    pooled_frontier,
)
from cactus_theory.optimum.selection import selection_law

__all__ = [
    "Frontier",
    "OptimalAcceptance",
    "PooledAcceptance",
    "PooledFrontier",
    "frontier",
    "optimal_acceptance",
    "pooled_acceptance",
    "pooled_frontier",
    "selection_law",
]
