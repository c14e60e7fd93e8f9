"""Exact laws of published verifiers of several drafts, coins integrated out, on tiny models.

Rows are numpy, q the one to be emitted (the target's, or any row h) and p the draft's. Sources:
recursive rejection, Miao et al. 2023 (SpecInfer, arXiv 2305.09781); k-SEQ, Sun et al. 2023
(SpecTr, arXiv 2310.15141); traversal, arXiv 2505.12398.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Row = np.ndarray
Model = Callable[[tuple[int, ...]], Row]
# of each node of a tree but the root: its parent, and its token
Nodes = Sequence[tuple[int, int]]
# [1, k] shrinks below an ulp
HALVINGS = 60


def _recovered(q: Row, p: Row) -> Row:
    left = np.maximum(q - p, 0.0)
    return left / left.sum() if left.sum() > 0 else q


def recursive_rejection(q: Row, p: Row, k: int, replaced: bool = True) -> tuple[Row, float]:
    """Return the emitted law and the acceptance of k drafts that are judged one after another.

    Each is judged by what those before it left to be emitted; drawn with or without replacement.
    """
    if not k or p.sum() <= 0:
        return q, 0.0
    kept = np.minimum(p, q)
    law, accepted = kept.copy(), kept.sum()
    if replaced:
        after, more = recursive_rejection(_recovered(q, p), p, k - 1)
        return law + (1 - kept.sum()) * after, accepted + (1 - kept.sum()) * more
    for token in np.flatnonzero(p > kept):
        rest = p.copy()
        rest[token] = 0.0
        rest = rest / (rest.sum() or 1.0)
        after, more = recursive_rejection(_recovered(q, p), rest, k - 1, False)
        law += (p - kept)[token] * after
        accepted += (p - kept)[token] * more
    return law, accepted


def k_seq_factor(q: Row, p: Row, k: int) -> float:
    """Return ρ in [1, k] with 1 − (1 − β)ᵏ = ρβ for β = Σ min(p, q/ρ), to the last bit.

    What is left after the drafts is a row only at this very ρ: rounding it shows in the law.
    """
    low, high = 1.0, float(k)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        share = np.minimum(p, q / middle).sum()
        low, high = (low, middle) if 1 - (1 - share) ** k < middle * share else (middle, high)
    return high


def k_seq(q: Row, p: Row, k: int, factor: float | None = None) -> tuple[Row, float]:
    """Return the emitted law and the acceptance of k drafts, each kept with min(1, q/(ρp))."""
    kept = np.minimum(p, q / (k_seq_factor(q, p, k) if factor is None else factor))
    share = kept.sum()
    if share <= 0:
        return q, 0.0
    accepted = 1 - (1 - share) ** k
    left = np.maximum(q - kept * accepted / share, 0.0)
    rest = left / left.sum() if left.sum() > 0 else q
    return kept * accepted / share + (1 - accepted) * rest, accepted


def drawn_trees(draft: Model, parents: Sequence[int]) -> Iterator[tuple[Nodes, float]]:
    """Yield every tree of a shape with its probability; siblings are drawn without replacement.

    ``parents`` are those of nodes 1, 2, …, in the order in which siblings are drawn.
    """
    yield from _grown(draft, parents, [], 1.0)


def _grown(
    draft: Model, parents: Sequence[int], nodes: list[tuple[int, int]], mass: float
) -> Iterator[tuple[Nodes, float]]:
    if len(nodes) == len(parents):
        yield tuple(nodes), mass
        return
    parent = parents[len(nodes)]
    row = draft(text_of(nodes, parent)).copy()
    row[[token for own, token in nodes if own == parent]] = 0.0
    for token in np.flatnonzero(row):
        yield from _grown(
            draft, parents, [*nodes, (parent, int(token))], mass * row[token] / row.sum()
        )


def text_of(nodes: Nodes, node: int) -> tuple[int, ...]:
    """Return the tokens from the root to a node."""
    if not node:
        return ()
    parent, token = nodes[node - 1]
    return (*text_of(nodes, parent), token)


def traversal(
    target: Model, draft: Model, nodes: Nodes, false_update: bool = False
) -> dict[tuple[int, ...], float]:
    """Return the law of what a drawn tree emits: an accepted path and one token more.

    Leaves are judged in the order of their numbers, which must be depth first; a node whose
    children are refused is a leaf. ``false_update`` is the R/(1 − p) found in public code.
    """
    rows = [(target(text_of(nodes, n)), draft(text_of(nodes, n))) for n in range(len(nodes) + 1)]
    alive: dict[int, float] = {0: 1.0}
    waiting, reached = list(range(1, len(nodes) + 1)), 1.0
    emitted: dict[tuple[int, ...], float] = {}

    def ratio(node: int) -> float:
        if node not in alive:
            parent, token = nodes[node - 1]
            q, p = rows[parent]
            alive[node] = min(1.0, ratio(parent) * q[token] / p[token])
        return alive[node]

    while True:
        inner = {nodes[node - 1][0] for node in waiting}
        leaf = next((node for node in waiting if node not in inner), 0)
        text, q = text_of(nodes, leaf), rows[leaf][0]
        for token in np.flatnonzero(q):
            key = (*text, int(token))
            emitted[key] = emitted.get(key, 0.0) + reached * ratio(leaf) * q[token]
        if not leaf:
            return emitted
        reached *= 1 - ratio(leaf)
        waiting.remove(leaf)
        parent, token = nodes[leaf - 1]
        left = np.maximum(ratio(parent) * rows[parent][0] - rows[parent][1], 0.0)
        rest, mass = rows[parent][1].copy(), left.sum()
        lost = 1 - rest[token] if false_update else mass + 1 - ratio(parent)
        rest[token] = 0.0
        alive[parent] = min(1.0, mass / lost) if lost > 0 else 0.0
        recovered = left / mass if mass > 0 else rows[parent][0]
        rows[parent] = recovered, rest / (rest.sum() or 1.0)
