"""Published verifiers of several drafts are lossless as written, and what breaks them is seen."""

import itertools

import numpy as np
import pytest
import torch

import cactus_theory as ct
from simulations.trees import references
from simulations.trees.rounds import Round, Sums, alone, followed
from solvers.paths import follow, random_tree
from tests.amounts import amount

# sums of a few hundred float64 terms
EXACT = 1e-12


def rows(count, seed, vocab=4):
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(vocab, 0.8), 2) for _ in range(count)]


def best(q, p, k, kind):
    """Return the best acceptance of a rule that emits q."""
    return ct.optimal_acceptance(q, ct.selection_law(q, p, k, kind), delta=0.0).acceptance


def without_replacement(q, p, k):
    """Return the law and the acceptance of recursive rejection of k different drafts."""
    if not k or p.sum() <= 0:
        return q, 0.0
    kept = np.minimum(p, q)
    law, accepted, refused = kept.copy(), kept.sum(), p - kept
    for token in np.flatnonzero(refused):
        rest = references._without(p, [token])
        after, more = without_replacement(references._recovered(q, p), rest, k - 1)
        law, accepted = law + refused[token] * after, accepted + refused[token] * more
    return law, accepted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sibling_rules_are_lossless_and_no_better_than_the_best(k):
    for q, p in rows(amount(20, 200), seed=k):
        by_kind = {
            "iid": [references.recursive_rejection(q, p, k), references.k_seq(q, p, k)],
            "without_replacement": [without_replacement(q, p, k)],
        }
        for kind, laws in by_kind.items():
            most = best(q, p, k, kind)
            for law, accepted in laws:
                np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
                assert accepted <= most + EXACT
                assert k > 1 or accepted == pytest.approx(most, abs=EXACT)
        assert by_kind["iid"][1][1] >= (1 - 1 / np.e) * best(q, p, k, "iid")


def test_k_seq_needs_its_factor_to_the_last_bit(monkeypatch):
    q, p = np.array([0.35, 0.35, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    factor = references.k_seq_factor(q, p, 4)
    assert 1 < factor < 4
    monkeypatch.setattr(references, "k_seq_factor", lambda *_: factor * (1 - 1e-3))
    law, _ = references.k_seq(q, p, 4)
    assert 1e-5 < np.abs(law - q).max() < 1e-2


def text_law(emitted, tree, length):
    """Return the law of the first tokens by text, those not emitted drawn from the target."""
    law = np.append(emitted, np.zeros(1 + tree.vocabulary * len(tree.target) - len(emitted)))
    for level in tree.levels[:length]:
        for node in range(level.start, level.stop):
            children = node * tree.vocabulary + 1
            law[children : children + tree.vocabulary] += law[node] * tree.target[node]
    return law[level.stop :]


def distance(places, seed, order=None, false_update=False):
    """Return the TV between the text that traversal emits and the target's."""
    tree, text = random_tree(3, 3, seed=seed), 0.0
    for nodes, mass in references.drawn_trees(tree, places):
        nodes = nodes if order is None else [0, *(nodes[at] for at in order)]
        law = references.traversal(tree, nodes, false_update)
        text = text + mass * text_law(law, tree, 3)
    return np.abs(text - text_law([1.0], tree, 3)).sum() / 2


# nodes depth first: chains of two, two children of the first one, both
SHAPES = {"1,1": (0, 1), "2,1": (0, 1, 0, 3), "three paths": (0, 1, 1, 0, 4)}


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_is_lossless(shape):
    for seed in range(amount(2, 20)):
        assert distance(SHAPES[shape], seed) <= EXACT


def test_traversal_with_the_update_of_public_code_is_not():
    assert max(distance(SHAPES["2,1"], seed, false_update=True) for seed in range(4)) > 5e-3


def test_traversal_of_nodes_numbered_path_by_path_is_not():
    assert max(distance(SHAPES["three paths"], seed, (1, 2, 4, 5, 3)) for seed in range(4)) > 5e-3
    assert distance(SHAPES["2,1"], 0, (1, 2, 3, 4)) <= EXACT  # two paths are depth first


def test_the_table_says_what_is_left_to_gain(monkeypatch):
    """No rule for independent drafts is better than the best one; no block than its program."""
    rng = np.random.default_rng(1)
    q, p = (torch.from_numpy(rng.dirichlet(np.ones(9), size)) for size in (2, 1))
    sums = Sums(1)
    sums.cycles[:] = 1
    for key, amounts in references._of_contexts(0, q, [Round(q, p, [0])]):
        sums.add(0, key, amounts)
    table = references._rows("one context", sums)
    by_rule = {(row["drafts"], row["rule"], row["policy"]): row for row in table}
    assert len(by_rule) == len(table) == 12 and table[0]["count"] == 1
    for policy in ("speculative", "band:price=1"):
        of_four = [by_rule["4 sampled", rule, policy] for rule in
                   ("best", *references.RULES)]  # fmt: skip
        accepted = [row["accepted_per_call"] for row in of_four]
        assert accepted[0] >= max(accepted[1:])
        assert accepted[0] > by_rule["1 sampled", "best", policy]["accepted_per_call"]
        assert len({row["kl_per_call"] for row in of_four}) == 1  # towards the same row
    relaxed = ct.optimal_acceptance(q[0].numpy(), p[0].numpy(), price=1.0)
    single = by_rule["1 sampled", "best", "band:price=1"]
    assert single["accepted_per_call"] == pytest.approx(relaxed.acceptance)
    assert single["kl_per_call"] == pytest.approx(relaxed.divergence)


def test_trees_of_the_table_are_those_of_the_verifiers(monkeypatch):
    """The walk's accepted tokens from the course of every path; the block's; traversal's."""
    monkeypatch.setattr(references, "PAIRS", 2)
    sums = references._of_pairs()
    accepted = {rule: path[0] for ((_, rule), _), path in sums.by_key.items()}
    for seed in range(2):
        tree, expected = random_tree(4, 4, seed=seed), 0.0
        block = follow(tree, tree.target, ct.divergence("kl"))
        assert accepted["block"][seed] == pytest.approx(block.tokens - 1)
        for first, second in itertools.product(range(4), repeat=2):
            nodes = [0, 1 + first, 1 + 4 * (1 + first) + second]
            q, p = (torch.from_numpy(rows[nodes]) for rows in (tree.target, tree.draft))
            path = Round(q, p[:2], [first, second])
            course = followed(path, alone(path, ct.policy("speculative")))
            caught = course.caught(path.p.topk(1)[1])
            expected += float(p[0, first] * p[1, second]) * (course.sums(caught)[0, -1] - 1)
        assert accepted["walk"][seed] == pytest.approx(expected, abs=EXACT)
        assert 0 < accepted["traversal"][seed] < 2
