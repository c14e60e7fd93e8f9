"""The tree of drafted paths: its order, its probabilities, what a row at every node is worth."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.special import rel_entr

import cactus_theory as ct
from cactus_theory.divergences import read_divergence
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment, Draft
from solvers.path_tree import PathTree, follow
from tests.amounts import amount
from tests.solvers.cases import random_tree

# sums of a few products of float64 numbers
ROUNDING = 1e-12
KL = read_divergence("kl")
# HiGHS, at its feasibility tolerance
LINEAR_PROGRAM = 1e-7


def node_of(prefix, vocabulary):
    """Return the place of a prefix by counting: shorter ones first, then in order of tokens."""
    shorter = sum(vocabulary**length for length in range(len(prefix)))
    order = list(itertools.product(range(vocabulary), repeat=len(prefix)))
    return shorter + order.index(tuple(prefix))


def prefixes(tree, length):
    return itertools.product(range(tree.vocabulary), repeat=length)


def by_hand(tree, target):
    """Return P and t of every prefix, one path at a time."""
    alive, reached = {(): 1.0}, {(): 1.0}
    drafted = {(): 1.0}
    for length in range(1, tree.depth + 1):
        for prefix in prefixes(tree, length):
            before, token = prefix[:-1], prefix[-1]
            row = node_of(before, tree.vocabulary)
            p = tree.draft[row, token]
            drafted[prefix] = drafted[before] * p
            accepted = alive[before] * target[row, token] / p if p else 0.0
            alive[prefix] = min(1.0, accepted)
            reached[prefix] = min(drafted[prefix], reached[before] * target[row, token])
    return alive, reached


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("vocabulary, depth", [(1, 3), (2, 1), (3, 3)])
def test_following_every_path_by_hand(vocabulary, depth, zeros):
    tree = random_tree(vocabulary, depth, seed=4, zeros=zeros)
    target = random_tree(vocabulary, depth, seed=5).target
    rows_h = np.where(tree.target > 0, target, 0.0)
    rows_h /= rows_h.sum(-1, keepdims=True)
    followed = follow(tree, rows_h, KL)
    alive, reached = by_hand(tree, rows_h)
    for prefix, share in alive.items():
        node = node_of(prefix, vocabulary)
        assert followed.alive[node] == pytest.approx(share, abs=ROUNDING)
        assert followed.reached[node] == pytest.approx(reached[prefix], abs=ROUNDING)
    assert followed.tokens == pytest.approx(sum(reached.values()), abs=ROUNDING)
    metered = 0.0
    for prefix, share in reached.items():
        if share and len(prefix) < depth:
            h, q = (rows[node_of(prefix, vocabulary)] for rows in (rows_h, tree.target))
            metered += share * float(rel_entr(h, q).sum())
    assert followed.divergence == pytest.approx(metered, abs=ROUNDING)


@pytest.mark.parametrize("seed", range(amount(2, 12)))
def test_no_joint_law_towards_these_rows_reaches_a_prefix_more_often(seed):
    """Theorem 12, claim 4: over every joint law of (path, accepted count, next token).

    One linear program for each prefix: the chance of drafting and accepting it, where the token
    after every prefix of the draft has its row. V = 2, K = 2: 24 variables.
    """
    tree, target = random_tree(2, 2, seed=seed, zeros=0.2), random_tree(2, 2, seed=seed + 50).target
    paths, cells = list(prefixes(tree, 2)), list(itertools.product(range(3), range(2)))
    events = [(path, count, token) for path in paths for count, token in cells]
    reached, drafted = by_hand(tree, target)[1], _drafted(tree)

    def mass(chosen):
        return np.array([float(chosen(*event)) for event in events])

    equal, to = [mass(lambda path, *_, own=own: path == own) for own in paths], []
    to += [drafted[path] for path in paths]
    for prefix in [u for length in range(2) for u in prefixes(tree, length)]:
        row, size = target[node_of(prefix, 2)], len(prefix)
        here = mass(lambda path, count, _, u=prefix, n=size: path[:n] == u and count >= n)
        for x in range(2):
            follows = mass(
                lambda path, count, token, u=prefix, n=size, x=x: (
                    path[:n] == u and count >= n and (path[n] if count > n else token) == x
                )
            )
            equal.append(follows - row[x] * here)
            to.append(0.0)
    for prefix in [u for length in (1, 2) for u in prefixes(tree, length)]:
        accepted = mass(lambda path, count, _, u=prefix: path[: len(u)] == u and count >= len(u))
        best = linprog(-accepted, A_eq=np.array(equal), b_eq=to, method="highs")
        assert best.status == 0
        assert -best.fun == pytest.approx(reached[prefix], abs=LINEAR_PROGRAM)


def _drafted(tree):
    paths = prefixes(tree, tree.depth)
    return {
        path: float(np.prod([tree.draft[node_of(path[:i], 2), x] for i, x in enumerate(path)]))
        for path in paths
    }


def test_the_block_verifier_reaches_the_least_of_both_limits_for_any_row():
    """Theory: m = min(p(ux), m(u) h(x)) for every fixed h; here by the verifier's own law."""
    tree, target = random_tree(3, 3, seed=1), random_tree(3, 3, seed=2).target
    followed = follow(tree, target, KL)
    paths = list(prefixes(tree, 3))
    nodes = [[node_of(path[:length], 3) for length in range(3)] for path in paths]
    h, p = (torch.from_numpy(rows[np.array(nodes)]) for rows in (target, tree.draft))
    draft = Draft(torch.tensor(paths), [3] * len(paths), p)
    assigned = Assignment((ct.policy("speculative"),))
    law = find_verifier("block").law(assigned, torch.cat([h, h[:, -1:]], 1), draft)
    for row, path in enumerate(paths):
        for length in range(4):
            share = float(law.alive[row, length])
            assert share == pytest.approx(followed.alive[node_of(path[:length], 3)], abs=ROUNDING)


def test_a_tree_is_read(tmp_path):
    tree = random_tree(2, 3, seed=1)
    np.savez(tmp_path / "tree.npz", target=tree.target, draft=tree.draft)
    read = PathTree.load(tmp_path / "tree.npz")
    np.testing.assert_allclose(read.target, tree.target, rtol=1e-15)
    np.testing.assert_allclose(read.draft, tree.draft, rtol=1e-15)
    np.savez(tmp_path / "logits.npz", target=np.log(tree.target) + 3, draft=np.log(tree.draft))
    again = PathTree.load(tmp_path / "logits.npz", logits=True)
    np.testing.assert_allclose(again.target, tree.target, rtol=1e-12)
