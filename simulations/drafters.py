"""Time drafters of one target on the same prompts: lossless, and at so many nats a token.

A drafter is a folder, of a draft model or of a head, or ``ngram``. Each is decoded at every K and
temperature in a shuffled order; of policies that differ in price, a level of nats is read off the
curve through them. Every decode is written to journal.jsonl under --out, and the table is made from
it alone. Seconds are the processor's, which others on the machine hardly change.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.commands.flags import PROMPTS as KINDS
from cactus_theory.commands.flags import add_chat
from cactus_theory.commands.models import add_models
from cactus_theory.decoding.drafters import NAMES
from cactus_theory.traces.estimate import Estimate, combined, ratio_of_sums

from .common.decode import Harness
from .common.grid import PLAIN, USUAL, Config, Grid, Job, Record, Runs, configs
from .common.inputs import (
    PAIR,
    PROMPTS,
    add_decode_arguments,
    at_least,
    loaded,
    model_digest,
    opened,
    settings_of,
)
from .common.journal import Journal
from .common.results import columns, publish
from .common.statistics import hermite, monotone_curve

LOSSLESS = "speculative"
# column → numerator, denominator, and whether of timed decodes alone
UNITS = {
    "tokens_per_call": ("tokens", "row_calls", False),
    "tokens_per_second": ("tokens", "seconds", True),
    "seconds_per_call": ("seconds", "row_calls", True),
    "draft_seconds_per_call": ("draft", "row_calls", True),
}
HEADS = {
    "drafter": "drafter", "temperature": "T", "policy": "policy", "nats": "nats\n/token",
    "num_draft_tokens": "K", "tokens_per_call": "tokens\n/call", "tokens_per_call_error": "±",
    "seconds_per_call": "s\n/round", "draft_seconds_per_call": "of it\ndraft",
    "tokens_per_second": "tokens/s", "over_plain": "× plain", "over_plain_error": "±",
    "over_first": "× first\ndrafter", "over_first_error": "±",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shipped = [*(PAIR / name for name in ("draft", "recurrent")), Path("ngram")]
    prices = [f"band:price={price:g}" for price in (1.7, 1.1, 0.7)]
    add_models(parser, target=PAIR / "target", drafted=False)
    add("--drafters", type=Path, nargs="+", default=shipped, metavar="FOLDER", help=NAMES)
    add("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=KINDS)
    add_chat(parser)
    add_decode_arguments(parser, widths=[2, 3, 4, 6], repeats=3)
    add("--policies", nargs="+", default=[LOSSLESS, *prices], metavar="SPEC")
    add("--verifier", nargs="+", default=[USUAL], metavar="NAME", help="chain (default), block")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.6], metavar="T")
    add("--level", type=float, default=0.05, metavar="NATS", help="a token")
    add("--metered", type=int, default=1, help="repeats before them, untimed")
    add("--out", type=Path, default=Path("drafters"))


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the table; return 0."""
    at_least(args, num_prompts=2, repeats=0, metered=1)
    cells = configs([], args.policies, args.num_draft_tokens, [1], args.verifier)
    names = [folder.name for folder in args.drafters]
    drafters = {folder.name: loaded(argparse.Namespace(**vars(args), draft=folder)).draft
                for folder in args.drafters}  # fmt: skip
    pair, every, ids = opened(args)
    prompts, ids = every[: args.num_prompts], ids[: args.num_prompts]
    grid = Grid(lines(names, cells, args.temperature), len(ids), args.repeats, args.metered,
                args.seed)  # fmt: skip
    digests = {str(folder): model_digest(folder) for folder in args.drafters}
    settings = settings_of(args, prompts) | {"drafters": digests}
    harness = Harness(pair, ids, args.max_new_tokens, args.seed)

    with Journal(args.out / "journal.jsonl", settings) as journal:
        table = rows(grid, decodes(harness, grid, drafters, journal), args.level)
    publish(args, table, args.out / "drafters.csv")
    best = [row for row in table if row["fastest"]]
    print(columns(best, HEADS, "each at its fastest K on these texts"))
    return 0


def decodes(
    harness: Harness, grid: Grid, drafters: Mapping[str, Any], journal: Journal | None = None
) -> dict[str, Record]:
    """Return every decode of a grid by the drafters that its lines name; a journal's are kept."""

    def decoded(job: Job) -> Record:
        pair = replace(harness.pair, draft=drafters.get(job.config.drafter))
        metered = job.repeat < grid.metered and job.config.method != PLAIN
        start = time.process_time()
        outcome = replace(harness, pair=pair).decode(
            job.config, job.group, repeat=job.repeat, meter=metered
        )
        seconds, parts = time.process_time() - start, outcome.record["parts"]
        drafting = seconds * parts[0] / sum(parts)
        return {"kl": 0.0} | outcome.record | {"seconds": seconds, "draft": drafting}

    return grid.fill(decoded, journal)


def lines(
    names: Sequence[str], cells: Sequence[Config], temperatures: Sequence[float] = (1.0,)
) -> list[Config]:
    """Return plain decoding, and every drafter in every cell, at each temperature."""
    plain = Config(PLAIN, 0, 1, drafter=PLAIN)
    return [
        replace(line, temperature=temperature)
        for temperature in temperatures
        for line in (plain, *(replace(cell, drafter=name) for name in names for cell in cells))
    ]


def rows(grid: Grid, records: Mapping[str, Record], level: float = 0.0) -> list[dict[str, Any]]:
    """Return a row for every drafter, temperature, family of policies and K of a grid of batch 1.

    The fastest K is marked; ``over_first`` is beside the first drafter at *its* fastest. Errors are
    the jackknife's over texts, of ratios over the same texts. What lines that differ in price do
    at ``level`` nats a token is empty where the level is not between theirs.
    """
    runs = grid.runs(records)
    groups: dict[tuple[float, str, str, int], list[Config]] = {}
    for line in grid.lines:
        key = line.temperature, line.drafter, line.family, line.width
        groups.setdefault(key, []).append(line)
    estimates = {
        key: _numbers([runs[line] for line in group], grid.prompts, level)
        for key, group in groups.items()
    }
    best: dict[Any, Estimate] = {}  # by temperature, drafter, family
    for (*key, _), numbers in estimates.items():
        speed, fastest = numbers["tokens_per_second"], best.get(tuple(key))
        if fastest is None or not fastest.value >= speed.value:
            best[tuple(key)] = speed
    first_drafter = next(line.drafter for line in grid.lines if line.method != PLAIN)
    table = []
    for (heat, name, family, width), numbers in estimates.items():
        speed, group = numbers["tokens_per_second"], groups[heat, name, family, width]
        rival = best.get((heat, first_drafter, family), speed)
        ratios = {"over_plain": speed / best[heat, PLAIN, PLAIN], "over_first": speed / rival}
        row: dict[str, Any] = {"drafter": name, "temperature": heat, "policy": family}
        row |= {"nats": level if len(group) > 1 else 0.0, "num_draft_tokens": width}
        row["fastest"] = best[heat, name, family] is speed
        for part, estimate in (numbers | ratios).items():
            row |= {part: estimate.value, f"{part}_error": estimate.standard_error}
        table.append({part: None if value != value else value for part, value in row.items()})
    return table


def _numbers(runs: Sequence[Runs], prompts: int, level: float) -> dict[str, Estimate]:
    """Return UNITS of a line, or at a level of lines that differ in price."""

    def ratios(above: str, below: str, parts: Sequence[Sequence[Record]]) -> list[Estimate]:
        def by_text(part: Sequence[Record], name: str) -> np.ndarray:
            return np.array([float(record[name]) for record in part]).reshape(-1, prompts).sum(0)

        pairs = [(by_text(part, above), by_text(part, below)) for part in parts]
        return [ratio_of_sums(*sums, "prompts") for sums in pairs]

    def at(*numbers: float) -> float:
        kl, height = np.reshape(numbers, (2, -1))
        curve = monotone_curve(np.log(kl[kl > 0]), height[kl > 0])
        value = hermite(float(np.log(level)), *curve)
        return math.nan if value is None else value

    timed = [line.clocked for line in runs]
    all_records = [line.metered + line.clocked for line in runs]
    estimates = {name: ratios(above, below, timed if clocked else all_records)
             for name, (above, below, clocked) in UNITS.items()}  # fmt: skip
    if len(runs) == 1:
        return {name: estimate for name, (estimate,) in estimates.items()}
    spent = ratios("kl", "tokens", [line.metered for line in runs])
    between = np.vectorize(at, otypes=[float])
    return {name: combined(between, *spent, *values) for name, values in estimates.items()}
