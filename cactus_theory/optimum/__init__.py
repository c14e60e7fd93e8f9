r"""The theorem of the band: the best acceptance under a budget on the emitted law.

.. math:: \max_h \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

For every divergence :math:`h = \mathrm{clip}(p, aq, bq)` with 0 ≤ a ≤ 1 ≤ b is optimal; the
divergence only decides how far to go along the path of such bands. ``batch_edges`` finds the two
numbers a and b, without a sort where it can, for the functions below and the policies;
``sorted_path`` has all bands sorted by p/q, and ``certificate`` translates budgets and prices and
bounds the optimum. ``rows`` accepts or refuses a token of one row on the host without
solving, at a node of a path by the band of p/P, a row by itself being that of P = 1. ``pooled``
spends one budget over rows; ``selection`` has what several drafts offer together, as one row, and
``look_ahead`` the best law of a block whose draft is deterministic. ``tilted`` asks for a worth
of the emitted token, too, and ``regret`` is for temperature 0.
Prior art for reverse KL: mentored decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv
2609.30474).
"""

from cactus_theory.optimum.acceptance import optimal_acceptance as optimal_acceptance
from cactus_theory.optimum.pooled import pooled_acceptance as pooled_acceptance
from cactus_theory.optimum.pooled import pooled_frontier as pooled_frontier
from cactus_theory.optimum.regret import optimal_regret as optimal_regret
from cactus_theory.optimum.selection import selection_law as selection_law
from cactus_theory.optimum.tilted import tilted_acceptance as tilted_acceptance
