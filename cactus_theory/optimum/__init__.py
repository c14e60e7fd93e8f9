r"""The theorem of the band: the best acceptance under a budget on the emitted law.

.. math:: \max_h \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

For every divergence :math:`h = \mathrm{clip}(p, aq, bq)` with 0 ≤ a ≤ 1 ≤ b, a band, is optimal;
the divergence only decides how far to go along the path of such bands. ``batch_edges`` finds the
edges a and b of many rows, without a sort where it can. ``sorted_path`` has all bands of a row
sorted by p/q, and ``certificate`` translates budgets and prices and bounds the optimum. ``rows``
decides a token of one row on the CPU, at a node of a path by the band of p/P, and solves the row
only after a rejection. ``pooled`` spends one budget over many rows. ``selection`` makes one draft
row of several drafts at a node. ``look_ahead`` has the best law of a block whose draft is
deterministic. ``tilted`` adds a least worth of the emitted token, and ``regret`` is for temperature
0. Policies, verifiers and the public functions below use these modules.
Prior art for reverse KL: mentored decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv
2609.30474).
"""

from cactus_theory.optimum.acceptance import optimal_acceptance as optimal_acceptance
from cactus_theory.optimum.pooled import pooled_acceptance as pooled_acceptance
from cactus_theory.optimum.pooled import pooled_frontier as pooled_frontier
from cactus_theory.optimum.regret import optimal_regret as optimal_regret
from cactus_theory.optimum.selection import selection_law as selection_law
from cactus_theory.optimum.tilted import tilted_acceptance as tilted_acceptance
