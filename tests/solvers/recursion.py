r"""The value of a drafted prefix by recursion, without a solver: what confirms the block program.

With P the alive ratio of a prefix u and F(u, P) the most that can follow it,

.. math:: F(u, P) = \max_h Σ_x p_x φ_x(P h_x/p_x) − ν P D(h\|q_u), \qquad
   φ_x(r) = \min(1, r) + F(ux, \min(1, r)), \qquad F = 0 \text{ after K tokens}

and 1 + F(root, 1) is the optimum at the price ν. F is concave in P, so that a chord lies below it,
and so does the best of some rows (THEORY.md, Theorem 13).
"""

import numpy as np
import torch

# steps of the first token's mass, in rows of two tokens
ROWS = 400


def values(tree, kind, price, points):
    """Return F from below, (nodes, points + 1) at alive ratios from 0 to 1, of two tokens."""
    alive = np.linspace(0, 1, points + 1)
    found = np.zeros((len(tree.target), points + 1))
    for node in reversed(range(len(found))):
        q, p = tree.target[node], tree.draft[node]
        first = np.append(np.linspace(0, 1, ROWS + 1), q[0])
        h = np.stack([first, 1 - first], -1)
        h = h[~(h[:, q == 0] > 0).any(-1)]
        spent = kind.value(torch.from_numpy(h), torch.from_numpy(q)).numpy()
        accepted = np.minimum(alive[:, None, None] * h, p)
        worth = accepted.sum(-1) - price * alive[:, None] * np.minimum(spent, 1e9)
        for token in np.flatnonzero(p):
            child = 2 * node + token + 1
            if child < len(found):
                ratio = accepted[..., token] / p[token]
                worth += p[token] * np.interp(ratio, alive, found[child])
        found[node] = worth.max(-1)
    return found
