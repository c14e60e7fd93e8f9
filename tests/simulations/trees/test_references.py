"""Published verifiers of several drafts are lossless as written, and what breaks them is seen."""

import itertools
from functools import cache

import numpy as np
import pytest

import cactus_theory as ct
from simulations.trees import references
from tests.amounts import amount

# sums of a few hundred float64 terms
EXACT = 1e-12


def rows(count, seed, vocab=4):
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(vocab, 0.8), 2) for _ in range(count)]


def best(q, p, k, kind):
    """Return the best acceptance of a rule that emits q."""
    return ct.optimal_acceptance(q, ct.selection_law(q, p, k, kind), delta=0.0).acceptance


@pytest.mark.parametrize("k", [1, 2, 3])
def test_sibling_rules_are_lossless_and_no_better_than_the_best(k):
    for q, p in rows(amount(20, 200), seed=k):
        found = {
            "iid": [references.recursive_rejection(q, p, k), references.k_seq(q, p, k)],
            "without_replacement": [references.recursive_rejection(q, p, k, replaced=False)],
        }
        for kind, laws in found.items():
            most = best(q, p, k, kind)
            for law, accepted in laws:
                np.testing.assert_allclose(law, q, rtol=0, atol=EXACT)
                assert accepted <= most + EXACT
                assert k > 1 or accepted == pytest.approx(most, abs=EXACT)
        assert found["iid"][1][1] >= (1 - 1 / np.e) * best(q, p, k, "iid")


def test_k_seq_needs_its_factor_to_the_last_bit():
    q, p = np.array([0.35, 0.35, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    factor = references.k_seq_factor(q, p, 4)
    assert 1 < factor < 4
    law, _ = references.k_seq(q, p, 4, factor * (1 - 1e-3))
    assert 1e-5 < np.abs(law - q).max() < 1e-2


def model(seed, vocab=3):
    """Return random rows by prefix."""

    @cache
    def row(text):
        return np.random.default_rng([seed, *text, len(text)]).dirichlet(np.full(vocab, 0.7))

    return row


def text_law(emitted, target, length):
    """Return the law of the first tokens, those beyond what is emitted drawn from the target."""
    law = {}
    for text, mass in emitted.items():
        whole = {text[:length]: mass}
        while len(next(iter(whole))) < length:
            whole = {
                (*own, token): part * share
                for own, part in whole.items()
                for token, share in enumerate(target(own))
            }
        for own, part in whole.items():
            law[own] = law.get(own, 0.0) + part
    return law


def distance(parents, seed, order=None, false_update=False):
    """Return the TV between the text that traversal emits and the target's."""
    target, draft = model(2 * seed), model(2 * seed + 1)
    length, found = 3, {}
    for nodes, mass in references.drawn_trees(draft, parents):
        if order is not None:
            places = {old: new for new, old in enumerate((0, *order))}
            nodes = [(places[nodes[old - 1][0]], nodes[old - 1][1]) for old in order]
        law = references.traversal(target, draft, nodes, false_update)
        for text, share in text_law(law, target, length).items():
            found[text] = found.get(text, 0.0) + mass * share
    plain = text_law({(): 1.0}, target, length)
    every = itertools.product(range(3), repeat=length)
    return sum(abs(found.get(text, 0.0) - plain[text]) for text in every) / 2


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
