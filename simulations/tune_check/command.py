"""Measure the tuner's whole grid on prompts that it did not see, and its choice against the best.

Every second prompt is for tuning: a trace is logged on them once, knobs are solved for every
level, costs measured for every batch size. The others are decoded by every family and K of that
grid and by plain decoding, in interleaved repeats, metered (metering is not timed). What was
tuned and every decode are kept in journal.jsonl under --out: a run that was killed goes on, and
one with more --repeats adds them.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from cactus_theory.decoding import load_pair

from ..common.decode import Harness
from ..common.grid import PLAIN, Config, Grid, Job
from ..common.inputs import add_pair_arguments, prompts_of
from ..common.journal import Journal, add_journal_arguments
from ..common.run import publish
from . import table, tuned

# of a decode's record; plain decoding has no meter
KEPT = ("seconds", "tokens", "row_calls", "kl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--kl-per-token", type=float, nargs="+", default=[0.02, 0.05, 0.1], metavar="NATS")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], metavar="K")
    add("--policies", nargs="+", metavar="NAME", help="families; default: the usual ones")
    add("--cycles", type=int, default=1000, help="of the trace")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--num-prompts", type=int, default=16, help="not seen in tuning, that are decoded")
    add("--repeats", type=int, default=20, help="each has seeds of its own")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("build/tune-check"), metavar="DIR")
    add("--publish", type=Path, metavar="FILE.csv", help="also write the table here")
    add_journal_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the table and the verdict; return 0."""
    texts = prompts_of(args.prompts)
    seen, unseen = texts[::2], texts[1::2][: args.num_prompts]
    if min(args.repeats, len(unseen)) < 1:
        raise ValueError(f"--prompts, --repeats: must leave one to decode; got {len(unseen)}")
    path = args.out / tuned.JOURNAL
    with Journal(path, _settings(args, texts), args.set_aside_damaged) as journal:
        pair = load_pair(args.target, args.draft, device=args.device)
        seen_ids, ids = (
            [pair.tokenizer(text)["input_ids"] for text in own] for own in (seen, unseen)
        )
        tuned.fill(args, journal, pair, seen_ids)
        grid = Grid(_lines(args, journal), len(ids), args.repeats, metered=0, seed=args.seed)
        # seeds of their own: the trace has used the first ones
        harness = Harness(pair, ids, args.max_new_tokens, args.seed + len(texts) + args.cycles)
        for config in grid.cold(journal.results):
            harness.decode(config, 0)

        def decoded(job: Job) -> dict[str, Any]:
            done = harness.decode(job.config, job.group, again=job.repeat, meter=True).record
            return {name: done.get(name, 0.0) for name in KEPT}

        rows = table.rows(args, journal.results, grid.runs(grid.fill(decoded, journal)))
    publish(args, rows, args.out / "tune.csv", args.publish)
    print(table.verdict(rows))
    return 0


def _settings(args: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    """Return all that decides a result, so that two runs are never mixed; repeats may be added."""
    names = ("batch", "num_draft_tokens", "kl_per_token", "policies", "cycles", "max_new_tokens",
             "num_prompts", "seed", "device", "threads")  # fmt: skip
    prompts = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return {name: getattr(args, name) for name in names} | {
        "prompts": prompts, "target": args.target.name, "draft": args.draft.name,
    }  # fmt: skip


def _lines(args: argparse.Namespace, journal: Journal) -> list[Config]:
    """Return every setting of the grid at every batch size, once."""
    found = [Config(PLAIN, 0, batch) for batch in args.batch]
    for batch in args.batch:
        for level in args.kl_per_token:
            lines = journal.results[tuned.key(batch, level)]["lines"]
            found += [table.config(args, line, batch) for line in lines]
    return list(dict.fromkeys(found))
