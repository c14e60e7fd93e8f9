"""Expected speed-up of policies, verifiers and draft lengths on a synthetic pair.

The pair has dials: vocabulary, Zipf exponent of the target, distance of the draft, mass that the
draft wastes on excluded tokens, and how the distance changes along a text. Its texts are a trace,
which is replayed with all coins integrated out. A call costs 1 + K (cost ratio + verify cost) +
fixed cost, in passes of the target over one token, and plain decoding 1 a token.
"""

import argparse
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cactus_theory.base.terminal import Progress
from cactus_theory.traces import Replay, Trace, replay
from cactus_theory.verify.contract import verifiers

from .common.grid import checked_policy, followers, label
from .common.inputs import at_least
from .common.results import columns, publish
from .replay import valued
from .synthetic import MEASURES, Dials, Texts, synthetic_trace

POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "typical")
OUT = Path("build/simulate.csv")
CAVEAT = (
    "Rows are independent of the drafted tokens and, but for the distance where --persistence is "
    "above 0, of each other. Those of real models are not: log a trace of your pair and replay it "
    "(python -m simulations trace, replay)."
)
WIDEST = 100
SHOWN = {
    "policy": "policy",
    "verifier": "verifier",
    "cost_ratio": "cost\nratio",
    "num_draft_tokens": "best\nK",
    "tokens_per_call": "tokens\nper call",
    "kl_per_token": "KL per\ntoken",
    "speedup": "speed-up",
    "speedup_se": "±",
}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    dials, texts = Dials(), Texts()
    add("--vocab", type=int, default=dials.vocab, metavar="V")
    add("--zipf", type=float, default=dials.zipf, help="the target's rows are rank^−zipf")
    add("--distance", type=float, default=dials.distance, help="of the draft from the target")
    add("--measure", choices=MEASURES, default=dials.measure, help="of --distance")
    add("--over-propose", type=float, default=dials.over_propose, metavar="MASS",
        help="of the draft on tokens that the target excludes")  # fmt: skip
    add("--spread", type=float, default=texts.spread, help="of the distance, in its logarithm")
    add("--persistence", type=float, default=texts.persistence,
        help="correlation of the distance from one position to the next")  # fmt: skip
    add("--texts", type=int, default=texts.texts)
    add("--cycles", type=int, default=texts.cycles, help="rounds of each text")
    add("--seed", type=int, default=texts.seed)
    add("--policy", nargs="+", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--verifier", nargs="+", default=["chain", "block"], help=", ".join(verifiers()))
    add("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    add("--cost-ratio", type=float, nargs="+", default=[0.1], metavar="C",
        help="of drafting one token, in target passes")  # fmt: skip
    add("--verify-cost", type=float, default=0.0, help="of one more token in a target pass")
    add("--fixed-cost", type=float, default=0.0, help="of a call, whatever it verifies")
    add("--save-trace", type=Path, metavar="DIR", help="keep the texts, to replay or audit them")
    add("--out", type=Path, default=OUT, metavar="FILE.csv")


def run(args: argparse.Namespace) -> int:
    """Make the texts, replay every case, write the CSV, print each case at its best K."""
    _check(args)
    dials = Dials(args.vocab, args.zipf, args.distance, args.measure, args.over_propose)
    longest = max(args.num_draft_tokens)
    texts = Texts(args.texts, args.cycles, longest, args.spread, args.persistence, args.seed)
    pairs = [
        (verifier, spec)
        for spec in map(checked_policy, args.policy)
        for verifier in followers(spec, args.verifier)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        trace = synthetic_trace(args.save_trace or Path(scratch) / "texts", dials, texts)
        replays = _replayed(trace, pairs, sorted(set(args.num_draft_tokens)))
    rows = list(table(replays, args.cost_ratio, args.verify_cost, args.fixed_cost))
    publish(args, rows, caveat=CAVEAT)
    print(columns([row for row in rows if row["best"]], SHOWN))
    for line in (f"± one standard error over texts; {len(rows)} rows in {args.out}", CAVEAT):
        print(textwrap.fill(line, WIDEST))
    return 0


def _check(args: argparse.Namespace) -> None:
    costs = {"cost-ratio": args.cost_ratio, "verify-cost": [args.verify_cost],
             "fixed-cost": [args.fixed_cost]}  # fmt: skip
    for flag, values in costs.items():
        for value in values:
            if not 0 <= value < float("inf"):
                raise ValueError(f"--{flag}: must be at least 0; got {value!r}")
    at_least(args, num_draft_tokens=1)


def _replayed(
    trace: Trace, pairs: Sequence[tuple[str, str]], widths: Sequence[int]
) -> list[tuple[str, Replay]]:
    replays = []
    with Progress("replaying", len(pairs) * len(widths)) as progress:
        for verifier, spec in pairs:
            for width in widths:
                replays.append((spec, replay(trace, spec, verifier, num_draft_tokens=width)))
                progress.advance(f"{spec} {verifier} K={width}")
    return replays


def call_cost(width: int, cost_ratio: float, verify_cost: float, fixed_cost: float) -> float:
    """Return what a call of ``width`` drafted tokens costs, in target passes over one token."""
    return 1 + width * (cost_ratio + verify_cost) + fixed_cost


def table(
    measured: Sequence[tuple[str, Replay]],
    cost_ratios: Sequence[float],
    verify_cost: float = 0.0,
    fixed_cost: float = 0.0,
) -> Iterator[Row]:
    """Yield one row per policy, verifier, cost ratio and K; ``best`` marks the fastest K."""
    cases: dict[tuple[str, str], list[Replay]] = {}
    for spec, replayed in measured:
        cases.setdefault((spec, replayed.verifier), []).append(replayed)
    for (spec, verifier), replays in cases.items():
        for ratio in cost_ratios:
            lines = []
            for replayed in replays:
                cost = call_cost(replayed.num_draft_tokens, ratio, verify_cost, fixed_cost)
                lines.append(
                    {
                        "policy": ":".join(filter(None, label(spec))),
                        "verifier": verifier,
                        "cost_ratio": ratio,
                        "num_draft_tokens": replayed.num_draft_tokens,
                        **valued("tokens_per_call", replayed.tokens_per_call),
                        "accepted_per_call": replayed.accepted_per_call.value,
                        **valued("kl_per_token", replayed.divergence_per_token()),
                        "speedup": replayed.tokens_per_call.value / cost,
                        "speedup_se": replayed.tokens_per_call.standard_error / cost,
                    }
                )
            best = max(row["speedup"] for row in lines)
            yield from (row | {"best": row["speedup"] == best} for row in lines)
