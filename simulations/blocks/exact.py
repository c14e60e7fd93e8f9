"""Policies and verifiers on trees of drafted paths against the optimum of every verifier.

Every prefix has a target row and a draft row, so that tokens per target call and metered
divergence are exact sums over all paths. The optimum at a policy's divergence per token is the
block program's (``python -m solvers block``), proven within 1e-6. It emits nothing that the
target excludes, and is not shown beside a policy that does.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cactus_theory as ct
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import verifiers
from solvers.paths import PathTree, random_tree

from ..common.progress import Progress
from ..common.results import publish
from ..common.terminal import text_table
from .gap import can_follow, measure, registered

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--rows", type=Path, help="a .npz of rows by prefix instead of random trees")
    add("--vocab", type=int, default=3, metavar="V")
    add("--num-draft-tokens", type=int, default=4, metavar="K")
    add("--seed", type=int, nargs="+", default=[1, 2, 3], help="a random tree each")
    add("--sharpness", type=float, default=1.0, help="standard deviation of the target's logits")
    add("--distance", type=float, default=1.0, help="of what the draft's logits differ by")
    add("--zeros", type=float, default=0.0, help="share of tokens excluded from each row")
    add("--policy", nargs="+", metavar="SPEC", help="every registered one at a few knobs if none")
    add("--verifier", nargs="+", choices=verifiers(metered=True), default=["chain", "block"])
    add("--divergence", default="kl", help="what is metered: kl, alpha:a=0.5, …")
    add("--kl-per-token", type=float, help="set each policy's knob to spend this much")
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    """Measure every policy on every tree, print a table, write the CSV."""
    rows = list(_rows(args))
    if not rows:
        raise ValueError("--policy: none of them can be followed, or none can spend that much")
    cells = [[_cell(row[name]) for name in COLUMNS] for row in rows]
    print(text_table(list(COLUMNS.values()), cells))
    notes = {
        "units": f"{args.divergence}, nats for kl; tokens include the recovered or bonus token",
        "gap_percent": "optimal tokens per call over the policy's at equal divergence per token",
    }
    publish(args, rows, **notes)
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{round(value, 4) + 0.0:.4f}" if isinstance(value, float) else str(value)


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the table's rows, tree after tree, in order of the gap."""
    cases = _cases(args)
    trees = _trees(args)
    with Progress("verifying", len(trees) * len(cases)) as progress:
        for name, tree in trees.items():
            found = []
            for case in cases:
                found += measure(tree, [case], args.divergence, args.kl_per_token)
                progress.advance(case[1].spec)
            for row in sorted(found, key=_place):
                yield {"tree": name, **row}


def _place(row: dict[str, Any]) -> float:
    return math.inf if row["gap_percent"] is None else row["gap_percent"]


def _cases(args: argparse.Namespace) -> list[tuple[str, Policy]]:
    """Return verifiers and policies; each policy once if its knob will be set for it."""
    found: dict[tuple[str, ...], tuple[str, Policy]] = {}
    for verifier in args.verifier:
        given = None if args.policy is None else [ct.policy(spec) for spec in args.policy]
        for policy in registered(verifier) if given is None else given:
            set_later = args.kl_per_token is not None and policy.knob is not None
            key = (policy.name, str(policy.knob)) if set_later else (policy.spec,)
            if can_follow(verifier, policy):
                found.setdefault((verifier, *key), (verifier, policy))
    return list(found.values())


def _trees(args: argparse.Namespace) -> dict[str, PathTree]:
    """Return the trees by name: the file's, or one a seed."""
    if args.rows is not None:
        return {args.rows.name: PathTree.load(args.rows)}
    dials = {name: getattr(args, name) for name in ("sharpness", "distance", "zeros")}
    return {
        f"seed {seed}": random_tree(args.vocab, args.num_draft_tokens, seed=seed, **dials)
        for seed in args.seed
    }
