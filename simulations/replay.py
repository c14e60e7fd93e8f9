"""Replay policies and verifiers on a trace, without its models: exact, nothing is sampled.

TRACE is a folder from ``python -m simulations trace``. Errors count texts; differences are paired
with the first line's.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cactus_theory.base.significance import items_needed
from cactus_theory.base.tables import print_json
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding.schedule import followers
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import read_policy
from cactus_theory.traces import Replay, Trace, replay
from cactus_theory.traces.estimate import valued
from cactus_theory.verify.contract import find_verifier, verifiers

from .common.grid import checked_policy
from .common.results import columns, publish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add("--policy", nargs="+", action="extend", required=True, metavar="SPEC",
        help="or FILE.py:NAME")  # fmt: skip
    add("--verifier", nargs="+", default=["chain"], metavar="NAME", help=", ".join(verifiers()))
    add("--num-draft-tokens", type=int, metavar="K", help="cut longer drafts to K tokens")
    add("--divergence", default="kl")
    add("--out", type=Path, metavar="FILE.csv")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    source = Trace.open(args.trace)
    specs = [checked_policy(spec, source.ends) for spec in args.policy]
    replays = _replays(args, source, specs)
    rows = replay_rows(replays, args.divergence)
    notes = {"trace": args.trace.resolve().name, "cycles": len(source), "texts": source.texts}
    if args.out is not None:
        told = source.header.details
        ran = {"dtype": told["model_dtype"]} if "model_dtype" in told else {}
        publish(args, rows, **{k: str(v) for k, v in (notes | ran).items()})
    if args.json:
        calls = {name: int(getattr(replays[0], name).sum()) for name in ("cycles", "drafts")}
        return print_json(notes | {"calls": calls, "replays": rows})
    print(table(rows, notes, args.divergence))
    if said := replays[0].undrafted:
        print(said)
    return 0


def _replays(args: argparse.Namespace, source: Trace, policies: Sequence[str]) -> list[Replay]:
    names = *args.verifier, *verifiers()
    able_of = {policy: followers(read_policy(policy), names)[0] for policy in policies}
    pairs = [(name, policy) for name in args.verifier for policy in policies
             if name in able_of[policy]]  # fmt: skip
    for policy, able in able_of.items() if pairs else ():
        if others := [name for name in args.verifier if name not in able]:
            reason = f"{policy} can only be verified with {', '.join(able)}: left out of"
            print(reason, ", ".join(others), file=sys.stderr)
    if not pairs:
        find_verifier(args.verifier[-1]).check(read_policy(policies[-1]))  # raises
    replays = []
    progress = Progress("replaying cycles", len(pairs) * len(source))
    for number, (verifier, policy) in enumerate(pairs):
        before = number * len(source)
        replays.append(
            replay(
                source,
                policy,
                verifier,
                num_draft_tokens=args.num_draft_tokens,
                divergences=(args.divergence,),
                on_cycles=lambda count, before=before: progress.update(before + count),
            )
        )
    return replays


Row = dict[str, Any]


def replay_rows(replays: Sequence[Replay], divergence: str) -> list[Row]:
    """Return one dictionary per replay; ``_se`` are standard errors over texts."""
    return [_replay_row(replay, replays[0], divergence) for replay in replays]


def table(rows: Sequence[Row], notes: Mapping[str, Any], divergence: str) -> str:
    spec = read_divergence(divergence).spec
    title = "{trace}: {cycles} cycles of {texts} texts".format(**notes)
    heads = {"policy": "policy", "verifier": "verifier", "num_draft_tokens": "K"}
    heads |= _with_errors("tokens_per_call", "tokens\n/call")
    heads |= _with_errors(f"{spec}_per_token", f"{'KL' if spec == 'kl' else spec}\n/token")
    heads |= _with_errors("tokens_difference", "tokens\n− first")
    heads |= {"texts_needed": "texts\nneeded"}
    shown = columns(rows, heads, title, f"{spec}_per_token")
    return (
        f"{shown}\n± one standard error over texts; differences are paired; needed: texts that\n"
        "make them significant, at 95 % in four of five samples"
    )


def _with_errors(name: str, head: str) -> dict[str, str]:
    return {name: head, f"{name}_se": "±"}


def _replay_row(replay: Replay, first: Replay, divergence: str) -> Row:
    spec = read_divergence(divergence).spec
    difference = replay.divergence_per_token(spec) - first.divergence_per_token(spec)
    row: Row = {
        "policy": replay.policy,
        "verifier": replay.verifier,
        "num_draft_tokens": replay.num_draft_tokens,
    }
    row |= valued("tokens_per_call", replay.tokens_per_call)
    row |= valued("accepted_per_call", replay.accepted_per_call)
    row |= valued(f"{spec}_per_token", replay.divergence_per_token(spec))
    row |= valued(f"{spec}_per_call", replay.divergence_per_call(spec))
    tokens = replay.tokens_per_call - first.tokens_per_call
    row |= valued("tokens_difference", tokens)
    texts = len(tokens.left_out)
    row["texts_needed"] = items_needed(tokens.value, tokens.standard_error, texts)
    row |= valued(f"{spec}_per_token_difference", difference)
    for place, rate in enumerate(replay.acceptance_by_position, 1):
        row[f"acceptance_{place}"] = rate.value
    return row
