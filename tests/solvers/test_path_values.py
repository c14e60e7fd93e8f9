"""Policies and verifiers on trees: exact values of a round, and none above the block program."""

from dataclasses import dataclass

import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import read_divergence
from cactus_theory.verify.contract import find_verifier, verifiers
from simulations.common.grid import followers
from solvers import block
from solvers.path_tree import PathTree
from tests.amounts import THOROUGH, amount, some
from tests.markov.pair import TinyPair
from tests.markov.rounds import drafted_rounds
from tests.rules import RULES, of_each
from tests.solvers.cases import random_tree

# what the program proves of itself, in tokens
PROOF = 1e-6
# divergences below are rounding
ROUNDING = 1e-12
# policies that may emit what the target excludes
LEAKING = ("mixture", "fuzzy", "cascade")
TREE = random_tree(3, 2, seed=1)
ZEROS = random_tree(3, amount(2, 3), seed=2, zeros=0.3)


@dataclass(frozen=True)
class Value:
    """Expected tokens and divergence of a target call."""

    tokens: float  # the recovered or bonus token included
    divergence: float  # D(emitted‖q) of every row reached before a bonus token
    excluded: float  # emitted tokens that the target excludes (q = 0)

    @property
    def per_token(self) -> float:
        spent = self.divergence / self.tokens
        return spent if spent > ROUNDING else 0.0


def value_of(policy: ct.Policy, verifier: str, tree: PathTree, spec: str = "kl") -> Value:
    """Return the exact value of one round of the decode loop, begun where nothing is drafted."""
    kind, start = read_divergence(spec), torch.zeros(1, dtype=torch.int64)
    pair, judge = as_pair(tree), find_verifier(verifier)
    rounds = drafted_rounds(pair, start, tree.depth, (policy,), judge)
    tokens = float(sum(alive.sum() for alive in rounds.alive))
    spent, excluded = 0.0, 0.0
    for level, alive, law in zip(tree.levels, rounds.alive, rounds.following, strict=False):
        q = torch.from_numpy(tree.target[level])
        metered = torch.where(alive[0] > 0, alive[0] * kind.value(law[0], q), 0.0)
        spent += float(metered.sum())
        excluded += float(alive[0] @ torch.where(q > 0, 0.0, law[0]).sum(-1))
    return Value(tokens, spent, excluded)


def as_pair(tree: PathTree) -> TinyPair:
    """Return the tree as two models whose states are its prefixes, the longest before the first."""
    nodes, vocab = tree.target.shape
    following = torch.arange(nodes * vocab).reshape(nodes, vocab) + 1
    following[following >= nodes] = 0
    return TinyPair(torch.from_numpy(tree.target), torch.from_numpy(tree.draft), following)


def test_the_optimum_is_reached_by_the_block_verifier():
    best = block.solve(TREE, price=1.0)
    as_target = PathTree(best.target, TREE.draft)
    lossless = value_of(ct.policy("speculative"), "block", as_target)
    assert lossless.tokens == pytest.approx(best.tokens)


@pytest.mark.parametrize("verifier", verifiers())
def test_no_policy_beats_the_optimum(verifier):
    """The program emits nothing that the target excludes: beside what does it says nothing."""
    for tree in (TREE, ZEROS) if THOROUGH else (TREE,):
        every = verifiers()
        policies = [spec for spec in of_each(2) if verifier in followers(spec, every)]
        for spec in some(policies, 9):
            value = value_of(RULES[spec], verifier, tree)
            if value.excluded > ROUNDING:
                assert tree is ZEROS and spec.startswith(LEAKING)
                continue
            best = block.solve(tree, "kl", per_token=value.per_token)
            assert value.tokens <= best.tokens * (1 + PROOF) <= (tree.depth + 1) * (1 + 2 * PROOF)
            assert abs(best.gap) <= PROOF


def test_only_leaking_policies_emit_what_the_target_excludes():
    leaking, kept = ct.policy("mixture:alpha=0.3,support=free"), ct.policy("band:price=1")
    assert value_of(leaking, "chain", ZEROS).excluded > 0.01
    assert value_of(kept, "chain", ZEROS).excluded == 0
