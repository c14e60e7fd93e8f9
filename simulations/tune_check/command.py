"""Measure the tuner's whole grid on prompts that it did not see, and its choice against the best.

Every second prompt is for tuning: a trace is logged on them once, knobs are solved for every
level, costs measured for every batch size. The others are decoded by every family and K of that
grid and by plain decoding, in interleaved repeats, metered (metering is not timed). What was
tuned and every decode are kept in journal.jsonl under --out: a run that was killed goes on, and
one with more --repeats adds them.
"""

import argparse
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cactus_theory.decoding import Pair, load_pair
from cactus_theory.traces import Trace
from cactus_theory.traces.log import log_shown
from cactus_theory.tuning import Costs, Prompts, Setting, Tuned, measure_costs, tune
from cactus_theory.tuning.choices import Choice

from ..common.decode import Harness
from ..common.grid import PLAIN, Config, Grid, Job
from ..common.inputs import add_pair_arguments, prompts_of
from ..common.journal import Journal, add_journal_arguments
from ..common.progress import Progress
from ..common.results import publish
from . import table
from .table import JOURNAL, key


def tune_all(
    args: argparse.Namespace, journal: Journal, pair: Pair, ids: Sequence[Sequence[int]]
) -> None:
    """Tune for every level and batch size, unless all of it is in the journal."""
    wanted = [(batch, level) for level in args.kl_per_token for batch in args.batch]
    if all(key(*own) in journal.results for own in wanted):
        return
    trace = _trace(args, pair, ids)
    settings: list[Setting] = []  # the first level's knobs, at which costs are measured
    clock = cache(lambda batch: _costs(args, pair, ids, batch, settings))

    def costs(own: Sequence[Setting]) -> Costs:
        settings.extend(() if settings else own)
        return clock(args.batch[0])

    with Progress("tuning, levels", len(args.kl_per_token)) as progress:
        for level in args.kl_per_token:
            values = args.out / f"values-{level:g}.json"
            widths, policies = args.num_draft_tokens, args.policies
            first = tune(trace, costs, level, widths=widths, policies=policies, values=values)
            for batch in args.batch:
                own = first.at_costs(clock(batch))
                if key(batch, level) not in journal.results:
                    journal.add(key(batch, level), _kept(own))
            progress.advance()


def _costs(
    args: argparse.Namespace,
    pair: Pair,
    ids: Sequence[Sequence[int]],
    batch: int,
    settings: Sequence[Setting],
) -> Costs:
    ends = pair.target.generation_config.eos_token_id
    prompts = Prompts(ids, batch, args.max_new_tokens, 1.0, ends, args.seed)
    with Progress(f"timing decodes, batch {batch}", 1) as progress:
        return measure_costs(pair.target, pair.draft, prompts, settings, on_decode=progress.of)


def _trace(args: argparse.Namespace, pair: Pair, ids: Sequence[Sequence[int]]) -> Trace:
    width, ends = max(args.num_draft_tokens), pair.target.generation_config.eos_token_id
    folder = args.out / "trace"
    return log_shown(args, pair, ids, folder, num_draft_tokens=width, eos_token_ids=ends)


def _kept(own: Tuned) -> dict[str, Any]:
    """Return what the journal keeps: all lines, and which one is chosen, −1 for plain decoding."""
    ratios = own.costs.as_ratios()
    alone = own.at_costs(Costs.ratios(**ratios, batch=own.costs.batch))
    places = {_name(choice): place for place, choice in enumerate(own.choices)}
    return {
        "plain": own.plain,
        "costs": own.costs.as_json() | {"ratios": ratios},
        "lines": [_line(choice) for choice in own.choices],
        "chosen": -1 if own.best is None else places[_name(own.best)],
        "chosen_by_ratios": -1 if alone.best is None else places[_name(alone.best)],
    }


def _name(own: Choice) -> tuple[str, int]:
    return own.family.key, own.num_draft_tokens


def _line(own: Choice) -> dict[str, Any]:
    meter, calls = own.replay.divergence_per_token(), own.replay.tokens_per_call
    values = "" if own.values is None else f",values={own.values.name}"
    return {
        "family": own.family.name,
        "policy": own.policy + values,
        "verifier": own.verifier,
        "num_draft_tokens": own.num_draft_tokens,
        "speed": own.speed.value,
        "speed_se": own.speed.standard_error,
        "tokens_per_call": calls.value,
        "kl": meter.value,
        "kl_se": meter.standard_error,
    }


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
    path = args.out / JOURNAL
    with Journal(path, _settings(args, texts), args.set_aside_damaged) as journal:
        pair = load_pair(args.target, args.draft, device=args.device)
        seen_ids, ids = (
            [pair.tokenizer(text)["input_ids"] for text in own] for own in (seen, unseen)
        )
        tune_all(args, journal, pair, seen_ids)
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
            lines = journal.results[key(batch, level)]["lines"]
            found += [table.config(args, line, batch) for line in lines]
    return list(dict.fromkeys(found))
