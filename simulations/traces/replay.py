"""Replay policies and verifiers on a trace, without its models: exact, nothing is sampled.

TRACE is a folder from ``python -m simulations trace``, or a file of target rows with DRAFT beside
it, which are then drafts of one token. Errors count texts; differences are paired with the
first line's. With --at, families of at least two knob values are also compared at equal
divergence per token.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cactus_theory.base.tables import print_json
from cactus_theory.decoding.schedule import check_followed, find_rule
from cactus_theory.traces import Replay, SavedRows, Trace, replay
from cactus_theory.verify.registry import find_verifier, verifiers

from ..common.grid import checked_policy
from ..common.progress import Progress
from ..common.results import publish
from . import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add("draft_rows", type=Path, nargs="?", metavar="DRAFT", help="draft rows, with target rows")
    add(
        "--policy",
        nargs="+",
        action="extend",
        required=True,
        metavar="SPEC",
        help="or FILE.py:NAME, a schedule too",
    )
    add("--verifier", nargs="+", default=["chain"], metavar="NAME", help=", ".join(verifiers()))
    add("--num-draft-tokens", type=int, metavar="K", help="cut longer drafts")
    add("--divergence", default="kl")
    add("--at", type=float, nargs="+", default=[], metavar="LEVEL", help="divergence per token")
    add("--by", metavar="COLUMN", help="also a table per value of this column of the prompts")
    add("--out", type=Path, metavar="FILE.csv")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Replay everything, print a table or JSON, write the CSV; return 0."""
    if args.draft_rows is None:
        source = Trace.open(args.trace)
    else:
        source = SavedRows.load(args.trace, args.draft_rows)
    if args.by is not None and not isinstance(source, Trace):
        raise ValueError(f"--by: rows have no prompts, a trace has; got {args.by!r}")
    groups = source.groups(args.by) if args.by and isinstance(source, Trace) else {}
    found = _replayed(args, source, [checked_policy(spec) for spec in args.policy])
    rows = table.rows(found, args.divergence)
    levels, missing = table.levels(found, args.at, args.divergence)
    for said in missing:
        print(said, file=sys.stderr)
    notes = {"trace": args.trace.resolve().name, "cycles": len(source), "texts": source.texts}
    parts = {
        value: table.rows([own.part(texts) for own in found], args.divergence)
        for value, texts in groups.items()
    }
    if args.out is not None:
        every = [{"group": value} | row for value, own in parts.items() for row in own]
        publish(args, every or rows, **{k: str(v) for k, v in notes.items()})
    if args.json:
        return print_json(
            notes | {"replays": rows, "levels": levels} | ({"groups": parts} if parts else {})
        )
    print(table.show(rows, levels, notes, args.divergence))
    for value, own in parts.items():
        texts = {"trace": f"{args.by} = {value}", "texts": len(groups[value])}
        cycles = int(sum(found[0].cycles[text] for text in groups[value]))
        print(f"\n{table.show(own, [], texts | {'cycles': cycles}, args.divergence)}")
    return 0


def _replayed(
    args: argparse.Namespace, source: Trace | SavedRows, policies: Sequence[str]
) -> list[Replay]:
    """Return one replay per verifier and policy."""
    able = {policy: _followers(policy, (*args.verifier, *verifiers())) for policy in policies}
    pairs = [(own, policy) for own in args.verifier for policy in policies if own in able[policy]]
    for policy, own in able.items() if pairs else ():
        if left := [name for name in args.verifier if name not in own]:
            said = f"{policy} can only be verified with {', '.join(own)}: left out of"
            print(said, ", ".join(left), file=sys.stderr)
    if not pairs:
        check_followed(find_rule(policies[-1]), find_verifier(args.verifier[-1]))  # raises
    found = []
    with Progress("replaying cycles", len(pairs) * len(source)) as progress:
        for number, (verifier, policy) in enumerate(pairs):
            before = number * len(source)
            own = replay(
                source,
                policy,
                verifier,
                num_draft_tokens=args.num_draft_tokens,
                divergences=(args.divergence,),
                on_cycles=lambda done, before=before: progress.update(before + done),
            )
            found.append(own)
    return found


def _followers(policy: str, names: Sequence[str]) -> list[str]:
    """Return the verifiers that can follow a policy or a schedule, each once."""
    found = []
    for judge, name in [(find_verifier(name), name) for name in dict.fromkeys(names)]:
        with suppress(ValueError):
            check_followed(find_rule(policy), judge)
            found.append(name)
    return found
