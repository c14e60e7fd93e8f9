"""What is left to gain: published verifiers of several drafts beside the best one, no coins.

One token: the contexts at which rounds of a lossless decode begin, each offer with the best rule
for it, lossless and by the band at PRICE; k-SEQ and recursive rejection emit the row of the best.
Trees: all drafts of PAIRS random pairs, four tokens each. Errors count texts, or pairs. Rows are
numpy, q the one to be emitted and p the draft's. Sources: recursive rejection, Miao et al. 2023
(SpecInfer, arXiv 2305.09781); k-SEQ, Sun et al. 2023 (SpecTr, arXiv 2310.15141); traversal, arXiv
2505.12398.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import Pair
from cactus_theory.divergences.classical import KL
from solvers.paths import PathTree, follow, random_tree

from ..replay import valued
from .rounds import LOSSLESS, Round, Sums, summed

Probs = np.ndarray
# [1, k] shrinks below an ulp
HALVINGS = 60
# drafts of one token, and the price of the band in tokens per nat
DRAFTS, PRICE = 4, 1.0
POLICIES: dict[str, Any] = {
    LOSSLESS: {"delta": 0.0},
    f"band:price={PRICE:g}": {"price": PRICE},
}
# random pairs, their vocabulary, and two paths of two tokens: what each node follows, depth first
PAIRS, VOCAB, PATHS = 100, 4, (0, 1, 0, 3)


def left(args: argparse.Namespace, pair: Pair, ids: Sequence[Tensor]) -> dict[str, list[Any]]:
    """Return the table, by its name."""
    rows = []
    for temperature in args.temperature:
        sums = summed(args, pair, ids, temperature, 1, _of_contexts)
        rows += _rows(f"contexts at temperature {temperature:g}", sums)
    return {"trees_left": rows + _rows(f"{PAIRS} random pairs", _of_pairs())}


def _rows(place: str, sums: Sums) -> list[dict[str, Any]]:
    names = {"rows": place, "count": int(sums.cycles.sum())}
    rows = []
    for (drafts, rule), policy in sums.by_key:
        replay = sums.replay((drafts, rule), policy)
        row = names | {"drafts": drafts, "rule": rule, "policy": policy}
        row |= valued("accepted_per_call", replay.tokens_per_call)
        rows.append(row | valued("kl_per_call", replay.divergence_per_call()))
    return rows


def _of_contexts(text: int, whole: Tensor, rounds: Sequence[Round]) -> Iterator[Any]:
    """Yield what is accepted of one token, and nats, by drafts, rule and policy."""
    for context in rounds:
        q, p = context.q[0].numpy(), context.p[0].numpy()
        likely = context.p[0].topk(DRAFTS)[1].numpy()
        offers = {
            "1 sampled": p,
            f"{DRAFTS} sampled": ct.selection_law(q, p, DRAFTS),
            f"{DRAFTS} likeliest": ct.selection_law(q, None, kind="certain", certain=likely),
            f"{DRAFTS - 1} likeliest, 1 sampled off them": ct.selection_law(
                q, p, kind="certain+off", certain=likely[:-1]
            ),
        }
        for drafts, law in offers.items():
            for policy, knob in POLICIES.items():
                best = ct.optimal_acceptance(q, law, **knob)
                nats = float(best.divergence)
                yield ((drafts, "best"), policy), [float(best.acceptance), nats]
                if drafts == f"{DRAFTS} sampled":
                    for name, rule in RULES.items():
                        accepted = rule(best.target, p, DRAFTS)[1]
                        yield ((drafts, name), policy), [accepted, nats]


def _of_pairs() -> Sums:
    """Return the tokens accepted of four drafted ones, enumerated."""
    sums = Sums(PAIRS)
    sums.cycles[:] = 1
    depths = np.repeat(range(len(PATHS) + 1), [VOCAB**n for n in range(len(PATHS) + 1)])
    for number in range(PAIRS):
        long = random_tree(VOCAB, len(PATHS), seed=number)
        short = PathTree(long.target[: 1 + VOCAB], long.draft[: 1 + VOCAB])
        path, beside = (follow(tree, tree.target, KL()) for tree in (long, short))
        inner = slice(len(short.target))
        replaced = np.maximum(beside.alive[inner, None] * short.target - short.draft, 0.0)
        caught = short.drafted[inner] @ replaced[range(len(replaced)), short.draft.argmax(1)]
        emitted = sum(mass * traversal(long, nodes) for nodes, mass in drawn_trees(long, PATHS))
        accepted = {
            ("1 path of 4", "block"): path.tokens - 1,
            ("1 path of 2, the likeliest beside", "walk"): beside.tokens - 1 + caught,
            ("2 paths of 2", "traversal"): emitted @ (depths - 1),
        }
        for name, tokens in accepted.items():
            sums.add(number, (name, LOSSLESS), [tokens, 0.0])
    return sums


def _recovered(q: Probs, p: Probs) -> Probs:
    left = np.maximum(q - p, 0.0)
    return left / left.sum() if left.sum() > 0 else q


def recursive_rejection(q: Probs, p: Probs, k: int) -> tuple[Probs, float]:
    """Return the emitted law and the acceptance of k drafts that are judged one after another.

    Each is judged by what those before it left to be emitted.
    """
    if not k:
        return q, 0.0
    kept = np.minimum(p, q)
    law, accepted = recursive_rejection(_recovered(q, p), p, k - 1)
    refused = (p - kept).sum()
    return kept + refused * law, kept.sum() + refused * accepted


def _without(row: Probs, tokens: Any) -> Probs:
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
    """Return the emitted law and the acceptance of k drafts, each kept with min(1, q/(ρp))."""
    kept = np.minimum(p, q / k_seq_factor(q, p, k))
    share = kept.sum()
    if share <= 0:
        return q, 0.0
    accepted = 1 - (1 - share) ** k
    emitted = kept * accepted / share
    return emitted + (1 - accepted) * _recovered(q, emitted), accepted


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
            row = _without(tree.draft[nodes[place]], np.isin(children, nodes))
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
        rows[parent] = _recovered(ratio(parent) * q, p), _without(p, [token])
        alive[parent] = min(1.0, mass / lost) if lost > 0 else 0.0


# what else engines do with independent drafts
RULES = {"k-SEQ": k_seq, "recursive rejection": recursive_rejection}
