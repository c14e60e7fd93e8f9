"""The optimum over every joint law of (drafted path, accepted count, next token). Not a test."""

import itertools
import warnings

import cvxpy as cp
import numpy as np

# tight enough that the difference to another program is that program's
TIGHT = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11, "max_iter": 500}


def joint_optimum(tree, spec, price):
    """Return the most tokens − price·divergence of any verifier, coins and all.

    One variable for each path, count of accepted tokens and token after them, given the path's
    probability. After prefix u the next token is the drafted one where more tokens are accepted,
    else the token after them; its law there is metered, the bonus after a whole path is not.
    """
    size, depth = tree.vocabulary, tree.depth
    paths = list(itertools.product(range(size), repeat=depth))
    law = cp.Variable((len(paths), (depth + 1) * size), nonneg=True)
    cells = list(itertools.product(range(depth + 1), range(size)))
    chance = [_probability(tree, path) for path in paths]
    tokens = sum(
        (count + 1) * law[row, cell]
        for row in range(len(paths))
        for cell, (count, _) in enumerate(cells)
    )
    spent, limits = 0.0, [cp.sum(law, axis=1) == np.array(chance)]
    for length in range(depth):
        for prefix in itertools.product(range(size), repeat=length):
            masses = [[] for _ in range(size)]
            for row, path in enumerate(paths):
                if path[:length] != prefix:
                    continue
                for cell, (count, token) in enumerate(cells):
                    if count >= length:
                        masses[path[length] if count > length else token].append(law[row, cell])
            node = _node(prefix, size)
            emitted = cp.hstack([cp.sum(cp.hstack(terms)) for terms in masses])
            limits.append(emitted[tree.target[node] == 0] == 0)
            spent += _paid(spec, emitted, tree.target[node])
    problem = cp.Problem(cp.Maximize(tokens - price * spent), limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an inaccurate status at this tolerance is accurate enough
        problem.solve(solver="CLARABEL", **TIGHT)
    return float(problem.value)


def _paid(spec, emitted, q):
    """Return Σ q m f(g/(q m)) with m = Σ g, as cvxpy writes it term by term."""
    mass, on = cp.sum(emitted), np.flatnonzero(q > 0)
    if spec == "kl":
        return sum(cp.rel_entr(emitted[x], q[x] * mass) for x in on)
    if spec == "pearson_chi2":
        return sum(cp.quad_over_lin(emitted[x], mass) / q[x] for x in on) - mass
    assert spec == "squared_hellinger"
    roots = [np.sqrt(q[x]) * cp.geo_mean(cp.hstack([emitted[x], mass])) for x in on]
    return 2 * mass - 2 * sum(roots)


def _node(prefix, size):
    node = 0
    for token in prefix:
        node = node * size + token + 1
    return node


def _probability(tree, path):
    return float(
        np.prod([tree.draft[_node(path[:i], tree.vocabulary), x] for i, x in enumerate(path)])
    )
