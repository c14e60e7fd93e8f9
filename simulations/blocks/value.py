"""What a policy and a verifier come to on a tree of drafted paths, all coins integrated out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies import Policy, policy
from cactus_theory.verify.contract import Assignment, Draft, Verifier
from cactus_theory.verify.registry import find_verifier
from solvers.paths import PathTree

# paths whose laws are computed at once
TOGETHER = 4096


@dataclass(frozen=True)
class Value:
    """Tokens per target call, the recovered or bonus token included, and metered divergence.

    Attributes
    ----------
    tokens : expected tokens per call.
    divergence : expected metered divergence per call: D(emitted‖q) of every row that is reached
        before a bonus token, which is free.
    excluded : expected number of emitted tokens that the target excludes (q = 0).
    """

    tokens: float
    divergence: float
    excluded: float = 0.0

    @property
    def per_token(self) -> float:
        """Return the metered divergence per emitted token."""
        return self.divergence / self.tokens


def value_of(
    rule: str | Policy,
    verifier: str | Verifier,
    tree: PathTree,
    divergence: str | Divergence = "kl",
) -> Value:
    """Return what a policy and a verifier come to on a tree, exactly.

    Every path that may be drafted is verified by :meth:`Verifier.law`, weighted by its
    probability.

    Raises
    ------
    ValueError
        A policy that the verifier cannot follow.
    NotImplementedError
        A verifier without an enumerated law.
    """
    followed, judge = policy(rule), find_verifier(verifier)
    judge.check(followed)
    kind, assigned = find_divergence(divergence), Assignment((followed,))
    tokens, spent, excluded = 1.0, 0.0, 0.0
    ids, nodes, chance = paths_of(tree)
    for start in range(0, len(ids), TOGETHER):
        part = slice(start, start + TOGETHER)
        q, p = (torch.from_numpy(rows[nodes[part]]) for rows in (tree.target, tree.draft))
        weight = torch.from_numpy(chance[part])
        drafted = torch.from_numpy(ids[part])
        bonus = torch.cat([q, q[:, -1:]], 1)  # what the last row holds is of no account here
        law = judge.law(assigned, bonus, Draft(drafted, [tree.depth] * len(drafted), p))
        place = torch.arange(tree.depth + 1, dtype=torch.float64)
        tokens += float(weight @ (law.stop @ place))
        alive = law.alive[:, :-1]
        metered = torch.where(alive > 0, alive * kind.value(law.emitted, q), 0.0)
        spent += float(weight @ metered.sum(-1))
        outside = torch.where(q > 0, 0.0, law.emitted).sum(-1)
        excluded += float(weight @ (alive * outside).sum(-1))
    return Value(tokens, spent, excluded)


def paths_of(tree: PathTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return every path that may be drafted.

    Its tokens (paths, K), the node of the row before each of them (paths, K), and its
    probability (paths,).
    """
    ids = np.array(list(itertools.product(range(tree.vocabulary), repeat=tree.depth)))
    nodes = np.zeros_like(ids)
    for place in range(1, tree.depth):
        nodes[:, place] = nodes[:, place - 1] * tree.vocabulary + ids[:, place - 1] + 1
    chance = tree.draft[nodes, ids].prod(-1)
    on = chance > 0
    return ids[on], nodes[on], chance[on]
