"""A rule as a stranger might write it, with claims that sound right.

``cactus-theory check simulations/gallery/agreement.py:agreement``
"""

import numpy as np

import cactus_theory as ct


@ct.rule(budget="kl <= 0.1 emitted", at_least_speculative=True)
def agreement(q, p, n, *, k=1):
    """Keep what is among the k favourites of both models; test anything else as usual."""
    place = max(len(q) - k, 0)
    favourite = all(row[n] >= np.partition(row, place)[place] for row in (q, p))
    return 1.0 if favourite and q[n] > 0 else min(1.0, q[n] / p[n])
