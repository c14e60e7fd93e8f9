"""Replay policies under the chain and the block verifier on a trace, at equal emitted KL.

TRACE is a folder from ``python -m simulations trace``. Tokens per call at a level are interpolated
between two knob values; errors count texts, and ratios to the token-wise band at a constant price
are paired.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cactus_theory.base.terminal import Progress
from cactus_theory.traces import Replay, Trace
from cactus_theory.traces.estimate import valued
from cactus_theory.traces.replays import replay_widths

from .common.results import columns, publish
from .replay import tokens_at_level

# knob values whose emitted KL covers 0.01 to 0.15 nats a token on pairs of small models
DELTAS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03)
BUDGETS = (0.005, 0.02, 0.06, 0.15, 0.4)
PRICES = (8.0, 4.0, 2.5, 1.5, 1.0, 0.7, 0.45)
# prices of bands that look ahead, which spend more at the same price
PRICES_AHEAD = (20.0, 9.0, 5.0, *PRICES[1:])
REFERENCE = "band:price, chain"
# knob of the band that solves every row by itself
OWN_ROWS = ",per_row=True"


@dataclass(frozen=True)
class Family:
    """A policy at several knob values under one verifier; one value where it is lossless."""

    name: str
    verifier: str
    policies: tuple[str, ...]

    @property
    def lossless(self) -> bool:
        return len(self.policies) == 1


def deterministic_families() -> list[Family]:
    """Return the families compared on deterministic drafts, which a band knows to their end."""
    return [
        *(Family(f"speculative, {judge}", judge, ("speculative",)) for judge in ("chain", "block")),
        _family("band:price", "chain", PRICES),
        _family("band:price", "block", PRICES, OWN_ROWS),
        _family("band:price", "block", PRICES_AHEAD),
    ]


def families() -> list[Family]:
    compared = []
    for verifier in ("chain", "block"):
        compared += [
            Family(f"speculative, {verifier}", verifier, ("speculative",)),
            _family("cactus:delta", verifier, DELTAS),
            _family("band:delta", verifier, BUDGETS),
            _family("band:price", verifier, PRICES, OWN_ROWS if verifier == "block" else ""),
        ]
    compared.append(_family("band:price", "block", PRICES))
    return compared


def _family(knob: str, verifier: str, amounts: Sequence[float], more: str = "") -> Family:
    policies = tuple(f"{knob}={amount:g}{more}" for amount in amounts)
    return Family(f"{knob}{more}, {verifier}", verifier, policies)


HEADS = {
    "num_draft_tokens": "K",
    "kl_per_token": "KL/token",
    "family": "family",
    "tokens_per_call": "tokens\n/call",
    "ratio": f"× {REFERENCE}\n(lossless: speculative, chain)",
    "ratio_se": "±",
}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16], metavar="K")
    add("--levels", type=float, nargs="+", default=[0.01, 0.03, 0.06, 0.1, 0.15],
        help="emitted KL in nats per token; lossless is added")  # fmt: skip
    add("--out", type=Path, default=Path("build/blocks"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    trace = Trace.open(args.trace)
    compared = families() if trace.manifest.total("draft_rows") else deterministic_families()
    replays: dict[int, dict[str, list[Replay]]] = {}
    with Progress("replaying", sum(len(family.policies) for family in compared)) as progress:
        for family in compared:
            for policy in family.policies:
                results = replay_widths(trace, policy, family.verifier, args.num_draft_tokens)
                for width, result in results.items():
                    replays.setdefault(width, {}).setdefault(family.name, []).append(result)
                progress.advance(policy)
    rows: list[Row] = []
    for width in args.num_draft_tokens:
        rows += _table(width, compared, replays[width], args.levels)
    notes = {"trace": trace.name, "cycles": str(len(trace)), "texts": str(trace.texts)}
    notes["trace_made"] = json.dumps(trace.header.flat())  # enough to make it again
    publish(args, rows, args.out / "blocks.csv", **notes)
    print(columns(rows, HEADS))
    return 0


def _table(
    width: int, compared: list[Family], replays: dict[str, list[Replay]], levels: list[float]
) -> list[Row]:
    """Return one row per family and level, lossless ones at 0."""
    rows = []
    lossless = replays["speculative, chain"][0].tokens_per_call
    for level in (0.0, *levels):
        reference = lossless
        if level:
            at_level = tokens_at_level(replays[REFERENCE], level)
            if at_level is None:
                continue
            reference = at_level
        for family in compared:
            if family.lossless != (level == 0):
                continue
            results = replays[family.name]
            if family.lossless:
                tokens = results[0].tokens_per_call
            else:
                tokens = tokens_at_level(results, level)
            if tokens is not None:
                ratio = tokens / reference
                error = 0.0 if tokens is reference else ratio.standard_error
                row = {"num_draft_tokens": width, "kl_per_token": level, "family": family.name}
                row |= valued("tokens_per_call", tokens)
                rows.append(row | {"ratio": ratio.value, "ratio_se": error})
    return rows
