"""Integrate a verification step over its coins exactly, cell by cell."""

import torch

import cactus_theory as ct

# the largest float64 below 1, the last value a coin can take
LAST_COIN = 1 - 2.0**-53
# a cell this thin lies between two roundings of one breakpoint and weighs nothing
ROUNDING_CELL = 1e-14


def cells(edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (midpoints, widths) of the intervals into which ``edges`` cut [0, 1]."""
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    cuts = torch.cat([ends, edges.double().flatten()]).clamp(0, 1).unique()
    middle, width = (cuts[1:] + cuts[:-1]) / 2, cuts.diff()
    real = width > ROUNDING_CELL
    return middle[real], width[real]


def step_law(rule, q, p, drafts):
    """Return {output: probability} of verify_chain, each output a tuple padded with −1.

    ``q`` (K + 1, V) and ``p`` (K, V) or None; ``drafts`` maps drafted tuples to their
    probability. Between two neighbouring breakpoints of a coin nothing can change, so one
    coin at the middle of each cell stands for all of it.
    """
    width = len(q) - 1
    drafted, coins, masses = [], [], []
    for tokens, mass in drafts.items():
        n = torch.tensor(tokens, dtype=torch.int64)
        phi = rule.acceptance(q[:width], p, n[:, None])
        recovered = rule.recovery(q[:width], p, n)
        draws = torch.cat([recovered, q[-1:]]).cumsum(-1)
        parts = [cells(edges) for edges in (*phi, draws)]
        grid = torch.cartesian_prod(*[middle for middle, _ in parts])
        weight = torch.cartesian_prod(*[size for _, size in parts]).prod(-1) * mass
        drafted.append(n.expand(len(grid), width))
        coins.append(grid)
        masses.append(weight)
    ids, grid, weight = torch.cat(drafted), torch.cat(coins), torch.cat(masses)
    verdict = ct.verify_chain(
        rule,
        q.expand(len(ids), width + 1, -1),
        None if p is None else p.expand(len(ids), width, -1),
        ids,
        coins=(grid[:, :width], grid[:, width]),
    )
    outputs, which = verdict.output_token_ids.unique(dim=0, return_inverse=True)
    total = torch.zeros(len(outputs), dtype=torch.float64).index_add(0, which, weight)
    return {tuple(row): share for row, share in zip(outputs.tolist(), total.tolist(), strict=True)}
