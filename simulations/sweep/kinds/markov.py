"""Whole texts of a tiny random Markov pair, enumerated: exact."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from ...markov import Setting, markov_pair
from ...markov.command import measured
from ..task import Row, Task, local, task

FLAGS = ("seeds", "vocab", "length", "distance")


def tasks(args: argparse.Namespace, cells: Sequence[tuple[str, str]]) -> Iterator[Task]:
    """Yield a task per pair (distance and seed), cell and K.

    Raises
    ------
    ValueError
        Numbers outside their range.
    """
    for distance in args.distance:
        for seed in args.seeds:
            pair = markov_pair(args.vocab, seed=seed, distance=distance)
            for policy, verifier in cells:
                for width in args.num_draft_tokens:
                    Setting(policy, width, args.length, verifier).check(pair)
                    case = {"verifier": verifier, "num_draft_tokens": width, "vocab": args.vocab,
                            "length": args.length, "distance": distance, "seed": seed}  # fmt: skip
                    yield task("markov", policy, case)


def measure(own: Task) -> list[Row]:
    """Return the KL of the text, the meter that bounds it, and tokens per call."""
    case = dict(own.case)
    pair = markov_pair(case["vocab"], seed=case["seed"], distance=case["distance"])
    policy, width = local(own.policy), case["num_draft_tokens"]
    return [case | measured(pair, Setting(policy, width, case["length"], case["verifier"]))]
