"""Gap of policies to the optimum of all verifiers at the same divergence.

Every prefix of a tree of drafted paths has a target row and a draft row, so that tokens per target
call and metered divergence of a policy and a verifier are exact sums over all paths, all coins
integrated out. The optimum at a policy's divergence per token is the block program's (``python -m
solvers block``), proven within 1e-6. It emits nothing that the target excludes, and is not shown
beside a policy that does.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.base.terminal import Progress
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier, find_verifier, verifiers
from solvers import block
from solvers.path_tree import PathTree, random_tree

from .common.grid import followers
from .common.results import columns, publish
from .markov.pair import TinyPair
from .markov.rounds import drafted_rounds

PRICES = (4, 2, 1, 0.5, 0.3, 0.2)
BANDS = [f"band:price={price}" for price in PRICES]
POLICIES = ["speculative", *BANDS, *(f"{band},per_row=True" for band in BANDS),
            *(f"cactus:delta={x}" for x in (0.01, 0.1, 1))]  # fmt: skip
# divergences below are rounding
ROUNDING = 1e-12

OUT = Path("build/block_gap.csv")
COLUMNS = {
    "tree": "tree",
    "verifier": "verifier",
    "policy": "policy",
    "tokens_per_call": "tokens\nper call",
    "divergence_per_token": "divergence\nper token",
    "optimal_tokens_per_call": "optimum\nthere",
    "gap_percent": "gap, %",
}


@dataclass(frozen=True)
class Value:
    """Expected tokens and divergence of a target call.

    Metered is D(emitted‖q) of every row that is reached before a bonus token, which is free.
    """

    tokens: float  # the recovered or bonus token included
    divergence: float
    excluded: float = 0.0  # emitted tokens that the target excludes (q = 0)

    @property
    def per_token(self) -> float:
        return self.divergence / self.tokens


def value_of(
    policy: str | Policy,
    verifier: str | Verifier,
    tree: PathTree,
    divergence: str | Divergence = "kl",
) -> Value:
    """Return the exact value of a policy and a verifier on a tree.

    It is one round of the decode loop, begun where nothing is drafted yet. A policy that the
    verifier cannot follow is a ValueError.
    """
    judged, judge = ct.policy(policy), find_verifier(verifier)
    judge.check(judged)
    kind, start = read_divergence(divergence), torch.zeros(1, dtype=torch.int64)
    rounds = drafted_rounds(as_pair(tree), start, tree.depth, (judged,), judge)
    tokens = float(sum(alive.sum() for alive in rounds.alive))
    spent, excluded = 0.0, 0.0
    for level, alive, law in zip(tree.levels, rounds.alive, rounds.following, strict=False):
        q = torch.from_numpy(tree.target[level])
        metered = torch.where(alive[0] > 0, alive[0] * kind.value(law[0], q), 0.0)
        spent += float(metered.sum())
        excluded += float(alive[0] @ torch.where(q > 0, 0.0, law[0]).sum(-1))
    return Value(tokens, spent, excluded)


def as_pair(tree: PathTree) -> TinyPair:
    """Return the tree as two models whose states are its prefixes.

    Those of all K tokens lead back to the first, whose row stands for their bonus tokens: their
    number is what counts here.
    """
    nodes, vocab = tree.target.shape
    following = torch.arange(nodes * vocab).reshape(nodes, vocab) + 1
    following[following >= nodes] = 0
    return TinyPair(torch.from_numpy(tree.target), torch.from_numpy(tree.draft), following)


def row_of(tree: PathTree, verifier: str, policy: Policy, divergence: str = "kl") -> dict[str, Any]:
    """Return a policy's value beside the optimum at its divergence per token.

    The optimum emits nothing that the target excludes; beside a policy that does, it is None.
    """
    value = value_of(policy, verifier, tree, divergence)
    row: dict[str, Any] = {
        "verifier": verifier,
        "policy": policy.spec,
        "tokens_per_call": value.tokens,
        "divergence_per_call": value.divergence,
        "divergence_per_token": value.per_token,
    }
    if value.excluded > ROUNDING:
        return row | {"optimal_tokens_per_call": None, "gap_percent": None, "proof_gap": None}
    budget = value.per_token if value.per_token > ROUNDING else 0.0
    best = block.solve(tree, divergence, per_token=budget)
    return row | {
        "optimal_tokens_per_call": best.tokens,
        "gap_percent": 100 * (best.tokens / value.tokens - 1),
        "proof_gap": best.gap,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocab", type=int, default=3, metavar="V")
    add("--num-draft-tokens", type=int, default=4, metavar="K")
    add("--seed", type=int, nargs="+", default=[1, 2, 3], help="a random tree each")
    add("--sharpness", type=float, default=1.0, help="standard deviation of the target's logits")
    add("--distance", type=float, default=1.0, help="of what the draft's logits differ by")
    add("--policy", nargs="+", metavar="SPEC", default=POLICIES)
    add("--verifier", nargs="+", choices=verifiers(metered=True), default=["chain", "block"])
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    cases = [(verifier, policy) for policy in map(ct.policy, dict.fromkeys(args.policy))
             for verifier in followers(policy.spec, args.verifier)]  # fmt: skip
    trees, rows = _trees(args), []
    with Progress("verifying", len(trees) * len(cases)) as progress:
        for name, tree in trees.items():
            compared = []
            for verifier, policy in cases:
                compared.append(row_of(tree, verifier, policy))
                progress.advance(policy.spec)
            rows += [{"tree": name, **row} for row in sorted(compared, key=_gap)]
    print(columns(rows, COLUMNS))
    notes = {
        "units": "kl, nats for kl; tokens include the recovered or bonus token",
        "gap_percent": "optimal tokens per call over the policy's at equal divergence per token",
    }
    publish(args, rows, **notes)
    return 0


def _gap(row: dict[str, Any]) -> float:
    return math.inf if row["gap_percent"] is None else row["gap_percent"]


def _trees(args: argparse.Namespace) -> dict[str, PathTree]:
    dials = {name: getattr(args, name) for name in ("sharpness", "distance")}
    return {
        f"seed {seed}": random_tree(args.vocab, args.num_draft_tokens, seed=seed, **dials)
        for seed in args.seed
    }
