r"""The theorem of the band: the best acceptance under a budget on the emitted law.

.. math:: \max_h \sum_i \min(p_i, h_i) \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

For every divergence :math:`h = \mathrm{clip}(p, aq, bq)` with 0 ≤ a ≤ 1 ≤ b, a band, is optimal. A
row has one such band for each rejection probability, and the divergence only decides which of them
a budget reaches. ``batch_edges`` finds the edges a and b of many rows, without a sort where it can.
``sorted_path`` looks up the bands of rows that are sorted by p/q. ``certificate`` measures bands
and proves that no row accepts more. ``band_row`` decides about a token of one row on the CPU, and
solves the row only after a rejection. ``pooled`` spends one budget over many rows. ``selection``
makes the draft row of a position at which several tokens are drafted. ``look_ahead`` has the best
law of a block whose draft is deterministic. ``tilted`` also sets a lower limit for the mean of a
token score such as ln q, and ``regret`` is for temperature 0. Policies, verifiers and the public
functions below use these modules.
Prior art for reverse KL: mentored decoding (Tran-Thien 2023; Tran-Thien & Nock, arXiv
2609.30474).
"""

from cactus_theory.optimum.acceptance import optimal_acceptance as optimal_acceptance
from cactus_theory.optimum.pooled import pooled_acceptance as pooled_acceptance
from cactus_theory.optimum.pooled import pooled_frontier as pooled_frontier
from cactus_theory.optimum.regret import optimal_regret as optimal_regret
from cactus_theory.optimum.selection import selection_law as selection_law
from cactus_theory.optimum.tilted import tilted_acceptance as tilted_acceptance
