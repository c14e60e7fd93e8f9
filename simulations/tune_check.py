"""Measure the tuner's whole grid on prompts that it did not see, and its choice against the best.

A random half of the prompts is for tuning, the same in every run: a trace is logged on them once,
knobs are solved for every level, costs measured for every batch size. The others are decoded by
every family and K of that grid and by plain decoding, in interleaved repeats, metered (metering is
not timed). What was
tuned and every decode are kept in journal.jsonl under --out: a run that was killed goes on, and
one with more --repeats adds them.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base.prompts import Prompt
from cactus_theory.base.specs import file_of
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import given_prompts
from cactus_theory.commands.models import add_inflate, loaded
from cactus_theory.decoding import Pair
from cactus_theory.policies import policy
from cactus_theory.traces.estimate import FEWEST_TEXTS, valued
from cactus_theory.traces.log import log_shown
from cactus_theory.tuning import Costs, Prompts, measure_costs, tune
from cactus_theory.tuning.choices import Choice, Halves, Tuned
from cactus_theory.tuning.measure import REPEATS, TimedSetting

from .common.answers import answer_rows, sentences
from .common.decode import Harness
from .common.grid import PLAIN, Config, Grid, Job, Runs, config_of, label
from .common.inputs import (
    ENDS,
    add_decode_arguments,
    add_end_arguments,
    add_pair_arguments,
    prompt_ids,
    settings_of,
)
from .common.journal import Journal
from .common.results import columns, publish
from .common.statistics import resamples, spread

Row = dict[str, Any]


def tune_all(
    args: argparse.Namespace, journal: Journal, pair: Pair, ids: Sequence[Sequence[int]]
) -> None:
    """Tune for every level and batch size, unless all of it is in the journal.

    Of ``args`` the temperature, cuts and number of timed decodes are the usual ones if not there.
    """
    cases = [(batch, level) for level in args.divergence_per_token for batch in args.batch]
    if all(key(*case) in journal.results for case in cases):
        return
    width = max(args.num_draft_tokens)
    folder, logged = args.out / "trace", pair
    if args.inflate is not None:  # its law is that of the pair itself, whose rows are short
        logged = loaded(argparse.Namespace(**vars(args) | {"inflate": None}))
    options = {"num_draft_tokens": width, "texts": FEWEST_TEXTS} | _law(args)
    trace = log_shown(args, logged, ids, folder, **options)
    settings: list[TimedSetting] = []  # the first level's knobs, at which costs are measured
    clock = cache(lambda batch: _costs(args, pair, ids, batch, settings))

    def costs(choices: Sequence[TimedSetting]) -> Costs:
        settings.extend(() if settings else choices)
        return clock(args.batch[0])

    with Progress("tuning, levels", len(args.divergence_per_token)) as progress:
        for level in args.divergence_per_token:
            widths, policies = args.num_draft_tokens, args.policies
            first = tune(trace, costs, level, widths=widths, policies=policies)
            for batch in args.batch:
                tuned = first.at_costs(clock(batch))
                if key(batch, level) not in journal.results:
                    journal.add(key(batch, level), _record(tuned))
            progress.advance()


def _costs(
    args: argparse.Namespace,
    pair: Pair,
    ids: Sequence[Sequence[int]],
    batch: int,
    settings: Sequence[TimedSetting],
) -> Costs:
    prompts = Prompts(ids, batch, args.max_new_tokens, seed=args.seed, **_law(args))
    own, repeats = (pair.target, pair.draft, prompts, settings), getattr(args, "timings", REPEATS)
    with Progress(f"timing decodes, batch {batch}", 1) as progress:
        return measure_costs(*own, repeats=repeats, on_decode=progress.of)


def _law(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("temperature", "cuts") if name in args}


def _record(tuned: Tuned) -> dict[str, Any]:
    """Return the journal's record: all lines, and the chosen one, −1 for plain decoding."""
    ratios = tuned.costs.as_ratios()
    by_ratios = tuned.at_costs(Costs.ratios(**ratios, batch=tuned.costs.batch))
    places = {_name(choice): place for place, choice in enumerate(tuned.choices)}
    return {
        "plain": tuned.plain,
        "costs": tuned.costs.as_json() | {"ratios": ratios},
        "lines": [_line(choice) for choice in tuned.choices],
        "chosen": -1 if tuned.best is None else places[_name(tuned.best)],
        "chosen_by_ratios": -1 if by_ratios.best is None else places[_name(by_ratios.best)],
    }


def _name(choice: Choice) -> tuple[str, int]:
    return choice.family.key, choice.num_draft_tokens


def _line(choice: Choice) -> Row:
    """Return the columns of a choice, its policy by its spec."""
    return {
        "family": choice.family.name,
        "policy": choice.policy,
        "verifier": choice.verifier,
        "num_draft_tokens": choice.num_draft_tokens,
        **valued("predicted_speed", choice.speed),
        "predicted_tokens_per_call": choice.reported.tokens_per_call.value,
        **valued("predicted_kl", choice.reported.divergence_per_token()),
    }


# columns of a setting that stand before its measurements; the other columns follow these
BEFORE_MEASURED = (
    "family", "policy", "verifier", "num_draft_tokens", "predicted_speed", "predicted_speed_se",
)  # fmt: skip
# fields of a decode's record; plain decoding has no meter
COLUMNS = ("seconds", "tokens", "row_calls", "kl", "raised", "lengths", "ended")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_pair_arguments(parser)
    add_inflate(parser)
    add("--divergence-per-token", type=float, nargs="+", default=[0.02, 0.05, 0.1], metavar="NATS")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add_decode_arguments(parser, widths=[1, 2, 3, 4, 6, 8], repeats=20)
    add_end_arguments(parser)
    add("--policies", nargs="+", metavar="NAME", help="families; default: the usual ones")
    add("--cycles", type=int, default=1000, help="of the trace")
    add("--out", type=Path, default=Path("build/tune-check"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the table and the verdict; return 0."""
    prompts = given_prompts(args)
    tuning, unseen, *_ = Halves.of([range(len(prompts))])
    unseen = unseen[: args.num_prompts]
    if min(args.repeats, len(unseen)) < 1:
        raise ValueError(f"--prompts, --repeats: must leave one to decode; got {len(unseen)}")
    path, pair = args.out / JOURNAL, loaded(args)
    with Journal(path, _settings(args, prompts)) as journal:
        every = prompt_ids(args, pair, prompts)
        tuning_ids, ids = ([every[number] for number in half] for half in (tuning, unseen))
        tune_all(args, journal, pair, tuning_ids)
        grid = Grid(_lines(args, journal), len(ids), args.repeats, metered=0, seed=args.seed)
        # seeds of their own: the trace has used the first ones
        seed = args.seed + len(prompts) + args.cycles
        harness = Harness(pair, ids, args.max_new_tokens, seed)

        def decoded(job: Job) -> dict[str, Any]:
            record = harness.decode(job.config, job.group, repeat=job.repeat, meter=True).record
            return {name: record.get(name, 0.0) for name in COLUMNS}

        runs = grid.runs(grid.fill(decoded, journal))
        rows = grid_rows(args, journal.results, runs)
    publish(args, rows, args.out / "tune.csv")
    answers = answer_rows(runs, len(ids), seed=args.seed)
    publish(args, answers, args.out / "answers.csv")
    print(verdict(rows))
    print("\n".join(sentences(answers)))
    return 0


def _settings(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return all that decides a result, so that two runs are never mixed; repeats may be added."""
    names = "batch num_draft_tokens divergence_per_token policies cycles num_prompts".split()
    return settings_of(args, prompts, *names, "device", *ENDS)


def _lines(args: argparse.Namespace, journal: Journal) -> list[Config]:
    """Return every setting of the grid at every batch size, once."""
    configs = [Config(PLAIN, 0, batch) for batch in args.batch]
    for batch in args.batch:
        for level in args.divergence_per_token:
            lines = journal.results[key(batch, level)]["lines"]
            configs += [config(args, line, batch) for line in lines]
    return list(dict.fromkeys(configs))


JOURNAL = "journal.jsonl"
HEADS = {
    "batch": "batch", "level": "level", "name": "chosen", "num_draft_tokens": "K",
    "measured_speed": "tokens/s", "of_the_best": "of the best", "measured_kl": "metered",
    "of_the_best_of_other_repeats": "other repeats", "best": "best measured", "ratios": "ratios",
}  # fmt: skip
# most ratio of metered divergence to the level that counts as within the level
WITHIN = 1.1


def key(batch: int, level: float) -> str:
    """Return the name under which a result of tuning is kept."""
    return f"tuned|batch={batch}|level={level:g}"


def config(args: argparse.Namespace, line: Mapping[str, Any], batch: int) -> Config:
    """Return the decode of a line of a tuned table; of files' policies those of ``--policies``."""
    trusted = [policy(name).spec for name in filter(file_of, args.policies or ())]
    return config_of(line, str(args.out / JOURNAL), batch, trusted)


def grid_rows(
    args: argparse.Namespace, results: Mapping[str, Any], runs: Mapping[Config, Runs]
) -> list[Row]:
    """Return one row per batch size, level and setting; plain decoding first."""
    measured = {line: _measured(decodes, args.seed) for line, decodes in runs.items()}
    rows = []
    for batch in args.batch:
        for level in args.divergence_per_token:
            tuned = results[key(batch, level)]
            place = {"batch": batch, "level": level}
            plain = {
                "family": PLAIN, "policy": PLAIN, "verifier": "", "num_draft_tokens": 0,
                "predicted_speed": tuned["plain"], "predicted_speed_se": 0.0,
                "predicted_tokens_per_call": 1.0, "predicted_kl": 0.0, "predicted_kl_se": 0.0,
            }  # fmt: skip
            lines = [(plain, Config(PLAIN, 0, batch))]
            lines += [(line, config(args, line, batch)) for line in tuned["lines"]]
            rows += _compared([
                place | _row(line, measured[decoded], tuned, number)
                for number, (line, decoded) in enumerate(lines, -1)
            ], level)  # fmt: skip
    return rows


def _compared(rows: Sequence[Row], level: float) -> list[Row]:
    """Return the rows, for the chosen one ``of_the_best_of_other_repeats``, without single speeds.

    Its speed in each repeat over that of the setting which is the fastest in the others, the
    median of these: the fastest of fifty noisy numbers is too good, and a machine's pace changes
    between repeats.
    """
    within = [row for row in rows if row["measured_kl"] <= WITHIN * level]
    chosen = next(row for row in rows if row["chosen"])
    repeats = range(len(chosen["speeds"]))
    ratios = []
    for repeat in repeats:
        others = [other for other in repeats if other != repeat] or [repeat]
        best = max(within, key=lambda row: float(np.median(row["speeds"][others])))  # noqa: B023
        ratios.append(float(chosen["speeds"][repeat] / best["speeds"][repeat]))
    column, ratio = "of_the_best_of_other_repeats", float(np.median(ratios))
    return [
        {name: value for name, value in row.items() if name != "speeds"}
        | {column: ratio if row is chosen else ""}
        for row in rows
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Return a table of the choices and the best of the grid, and two sentences on the rest."""
    choices = []
    for batch, level in dict.fromkeys((row["batch"], row["level"]) for row in rows):
        lines = [row for row in rows if (row["batch"], row["level"]) == (batch, level)]
        choices.append(_choice(lines, level))
    lossy = [row for row in rows if row["predicted_kl"] > 1e-9]
    off = [row["measured_speed"] / row["predicted_speed"] - 1 for row in rows]
    kl_off = [row["measured_kl"] / row["predicted_kl"] - 1 for row in lossy]
    return "\n".join([
        columns(choices, HEADS, "choices against the measured grid", needed="measured_kl"),
        f"measured over predicted tokens/s: {_spread(off)}",
        f"measured over predicted KL per token: {_spread(kl_off)}",
        f"best: among settings that metered at most {WITHIN:g} times the level; other repeats: "
        "over what is fastest in these; ratios: whether the costs as three ratios lead to the "
        "same policy",
    ])  # fmt: skip


def _choice(rows: Sequence[Row], level: float) -> Row:
    """Return the chosen setting beside the best within the level."""
    chosen = next(row for row in rows if row["chosen"])
    by_ratios = next(row for row in rows if row["chosen_by_ratios"])
    within = [row for row in rows if row["measured_kl"] <= WITHIN * level]
    best = max(within, key=lambda row: row["measured_speed"])
    same = by_ratios["family"] == chosen["family"]
    return chosen | {
        "name": _family(chosen),
        "num_draft_tokens": chosen["num_draft_tokens"] or None,
        "of_the_best": chosen["measured_speed"] / best["measured_speed"],
        "best": f"{_family(best)}, K={best['num_draft_tokens']}",
        "ratios": "same" if same else _family(by_ratios),
    }


def _family(row: Row) -> str:
    return f"{row['family']}@{row['verifier']}" if row["verifier"] else row["family"]


def _spread(off: Sequence[float]) -> str:
    if not off:
        return "nothing to compare"
    low, middle, high = np.percentile(off, [10, 50, 90])
    return f"{1 + middle:.3f} (80 % between {1 + low:.3f} and {1 + high:.3f})"


def _row(line: Row, measured: Row, tuned: Mapping[str, Any], number: int) -> Row:
    known = {name: line[name] for name in BEFORE_MEASURED}
    named = {"policy": ":".join(filter(None, label(line["policy"])))}
    picks = {name: int(tuned[name] == number) for name in ("chosen", "chosen_by_ratios")}
    return known | measured | line | named | picks


def _measured(runs: Runs, seed: int) -> Row:
    """Return medians over repeats with intervals over resampled prompts, and what was metered."""
    drawn = runs.drawn(resamples(len(runs.timed[0]), seed))
    return {
        "speeds": runs.speeds,
        **spread("measured_speed", runs.speeds, drawn),
        "measured_tokens_per_call": runs.ratio("tokens", "row_calls"),
        "measured_kl": runs.ratio("kl", "tokens"),
    }
