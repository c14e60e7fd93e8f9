"""Published verifiers of several drafts are lossless as written, and what breaks them is seen."""

import numpy as np
import pytest

import cactus_theory as ct
from solvers.path_tree import random_tree
from tests.amounts import amount
from tests.reference import several_drafts as references

# sums of a few hundred float64 terms
EXACT = 1e-12


def rows(count, seed, vocab=4):
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(vocab, 0.8), 2) for _ in range(count)]


def without_replacement(q, p, k):
    """Return the law and the acceptance of recursive rejection of k different drafts."""
    if not k or p.sum() <= 0:
        return q, 0.0
    common = np.minimum(p, q)
    law, accepted, refused = common.copy(), common.sum(), p - common
    for token in np.flatnonzero(refused):
        rest = references.without(p, [token])
        after, more = without_replacement(references.recovered(q, p), rest, k - 1)
        law, accepted = law + refused[token] * after, accepted + refused[token] * more
    return law, accepted


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sibling_rules_are_lossless_and_no_better_than_the_best(k):
    for q, p in rows(amount(20, 200), seed=k):
        law, _ = without_replacement(q, p, k)  # whose best is not offered
        np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
        most = ct.optimal_acceptance(q, ct.selection_law(q, p, k), delta=0.0).acceptance
        for rule in (references.recursive_rejection, references.k_seq):
            law, accepted = rule(q, p, k)
            np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
            assert accepted <= most + EXACT
            assert k > 1 or accepted == pytest.approx(most, abs=EXACT)
        assert accepted >= (1 - 1 / np.e) * most  # of k-SEQ


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
