"""What the field does with several drafts of a token, and with drawn trees: exact laws, no coins.

Rows are numpy, q the one to be emitted and p the draft's. Sources: recursive rejection, Miao et al.
2023 (SpecInfer, arXiv 2305.09781); k-SEQ, Sun et al. 2023 (SpecTr, arXiv 2310.15141); traversal,
arXiv 2505.12398.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from solvers.path_tree import PathTree

Probs = np.ndarray
# [1, k] shrinks below an ulp
HALVINGS = 60


def recovered(q: Probs, p: Probs) -> Probs:
    left = np.maximum(q - p, 0.0)
    return left / left.sum() if left.sum() > 0 else q


def recursive_rejection(q: Probs, p: Probs, k: int) -> tuple[Probs, float]:
    """Return the emitted law and the acceptance of k drafts that are judged one after another.

    Each is judged by what those before it left to be emitted.
    """
    if not k:
        return q, 0.0
    common = np.minimum(p, q)
    law, accepted = recursive_rejection(recovered(q, p), p, k - 1)
    refused = (p - common).sum()
    return common + refused * law, common.sum() + refused * accepted


def without(row: Probs, tokens: Any) -> Probs:
    rest = row.copy()
    rest[tokens] = 0.0
    return rest / (rest.sum() or 1.0)


def k_seq_factor(q: Probs, p: Probs, k: int) -> float:
    """Return ρ in [1, k] with 1 − (1 − β)ᵏ = ρβ for β = Σ min(p, q/ρ), to the last bit.

    What is left after the drafts is a row only at this very ρ: rounding it shows in the law.
    """
    low, high = 1.0, float(k)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        share = np.minimum(p, q / middle).sum()
        low, high = (low, middle) if 1 - (1 - share) ** k < middle * share else (middle, high)
    return high


def k_seq(q: Probs, p: Probs, k: int) -> tuple[Probs, float]:
    """Return the emitted law and the acceptance of k drafts, each accepted with min(1, q/(ρp))."""
    common = np.minimum(p, q / k_seq_factor(q, p, k))
    share = common.sum()
    if share <= 0:
        return q, 0.0
    accepted = 1 - (1 - share) ** k
    emitted = common * accepted / share
    return emitted + (1 - accepted) * recovered(q, emitted), accepted


def drawn_trees(tree: PathTree, places: Sequence[int]) -> list[tuple[list[int], float]]:
    """Return every drawn tree of a shape with its probability; siblings all differ.

    Nodes are numbers of prefixes, the root's 0 first. ``places`` are those among the nodes of what
    each further one follows, in the order in which siblings are drawn.
    """
    trees = [([0], 1.0)]
    for place in places:
        grown = []
        for nodes, mass in trees:
            children = nodes[place] * tree.vocabulary + 1 + np.arange(tree.vocabulary)
            row = without(tree.draft[nodes[place]], np.isin(children, nodes))
            pairs = zip(children.tolist(), row.tolist(), strict=True)
            grown += [([*nodes, child], mass * chance) for child, chance in pairs if chance > 0]
        trees = grown
    return trees


def traversal(tree: PathTree, nodes: Sequence[int], false_update: bool = False) -> Probs:
    """Return the law of what a drawn tree emits, accepted tokens and one more, by prefix.

    Leaves are judged in the order of their numbers, which must be depth first; a node whose
    children are refused is a leaf. ``false_update`` is the R/(1 − p) found in public code.
    """
    vocab = tree.vocabulary
    rows = {node: (tree.target[node], tree.draft[node]) for node in nodes}
    alive, waiting, reached = {0: 1.0}, list(nodes[1:]), 1.0
    emitted = np.zeros(1 + vocab * len(tree.target))

    def ratio(node: int) -> float:
        if node not in alive:
            parent, token = divmod(node - 1, vocab)
            q, p = rows[parent]
            alive[node] = min(1.0, ratio(parent) * q[token] / p[token])
        return alive[node]

    while True:
        inner = {(node - 1) // vocab for node in waiting}
        leaf = next((node for node in waiting if node not in inner), 0)
        emitted[leaf * vocab + 1 : (leaf + 1) * vocab + 1] += reached * ratio(leaf) * rows[leaf][0]
        if not leaf:
            return emitted
        reached *= 1 - ratio(leaf)
        waiting.remove(leaf)
        parent, token = divmod(leaf - 1, vocab)
        q, p = rows[parent]
        mass = np.maximum(ratio(parent) * q - p, 0.0).sum()
        lost = 1 - p[token] if false_update else mass + 1 - ratio(parent)
        rows[parent] = recovered(ratio(parent) * q, p), without(p, [token])
        alive[parent] = min(1.0, mass / lost) if lost > 0 else 0.0
