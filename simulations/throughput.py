"""Time policies and baselines on the same prompts; resume where a kill left off.

The default grid takes about 25 minutes on one core; --num-prompts 4 --repeats 3 --metered 1 takes
about one minute. Every decode is written to journal.jsonl under --out before the next decode
starts, and the table (CSV) is made from that file alone. Every repeat decodes all prompts by all
methods in a shuffled order, with new seeds. Intervals are 90 % over resampled prompts; with few
prompts they are too narrow (8 prompts: 82 % coverage, 30 prompts: 88 %).

--verifier chain block decodes every policy token by token and, if possible, by whole drafted paths.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cactus_theory.base.prompts import Prompt
from cactus_theory.commands.flags import given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding.drafters import holds_head, named_drafter

from .common.decode import Harness
from .common.grid import (
    BASELINES,
    HF_ASSISTED,
    HF_PLAIN,
    PLAIN,
    USUAL,
    Config,
    Grid,
    Job,
    Runs,
    configs,
    fastest,
    method,
)
from .common.inputs import add_decode_arguments, at_least, prompt_ids, settings_of
from .common.journal import Journal
from .common.results import columns, publish
from .common.statistics import resamples, spread

Row = dict[str, Any]
# budgets in nats, close enough that curves can be read between 0.02 and 0.2 nats per token
CACTUS_DELTAS = (1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.03, 0.1, 1)
BAND_DELTAS = (0.01, 0.03, 0.1, 0.3)
BAND_PRICES = (8, 6, 4, 3, 2, 1.5, 1, 0.7, 0.5, 0.35, 0.25)
POLICIES = (
    "speculative",
    "speculative:tilt=0.11",
    "truncated:top_p=0.95",
    "mixture:alpha=0.5",
    "typical",
    *(f"cactus:delta={delta:g}" for delta in CACTUS_DELTAS),
    *(f"band:delta={delta:g}" for delta in BAND_DELTAS),
    *(f"band:price={price:g}" for price in BAND_PRICES),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_decode_arguments(parser, policies=POLICIES, out="throughput", widths=[3, 7], repeats=12)
    add("--verifier", nargs="+", default=[USUAL], metavar="NAME", help="chain, block")
    add("--baselines", nargs="*", default=list(BASELINES), metavar="NAME")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add(
        "--metered",
        type=int,
        default=3,
        help="untimed repeats before the timed ones, for cost and quality; 0: no meter",
    )


def run(args: argparse.Namespace) -> int:
    baselines = args.baselines
    if holds_head(args.draft) or named_drafter(args.draft):  # the library needs a draft model
        if HF_ASSISTED in args.baselines and args.baselines != list(BASELINES):
            raise ValueError(f"--baselines: {HF_ASSISTED} takes a draft model; got {args.draft}")
        baselines = [name for name in baselines if name != HF_ASSISTED]
    kinds = baselines, args.policy, args.num_draft_tokens, args.batch, args.verifier
    lines = configs(*kinds)
    at_least(args, metered=0, repeats=0 if args.metered else 1, num_prompts=1)
    prompts = given_prompts(args)[: args.num_prompts]
    grid = Grid(lines, len(prompts), args.repeats, args.metered, args.seed)

    @cache  # loaded at the first decode: a finished run makes its tables without a model
    def harness() -> Harness:
        pair = loaded(args)
        return Harness(pair, prompt_ids(args, pair, prompts), args.max_new_tokens, args.seed)

    def decoded(job: Job) -> Row:
        metered = job.repeat < args.metered
        done = harness().decode(job.config, job.group, repeat=job.repeat, meter=metered)
        return done.record | {"dtype": harness().pair.dtype}

    with Journal(args.out / "journal.jsonl", _settings(args, lines, prompts)) as journal:
        results = grid.fill(decoded, journal)
    dtype = ", ".join(dict.fromkeys(str(one.get("dtype")) for one in results.values()))
    table = speed_rows(grid.runs(results), args.seed)
    publish(args, table, args.out / "throughput.csv", dtype=dtype)
    print(f"written to {args.out}/: journal.jsonl, throughput.csv")
    print(speeds(table), LEGEND, sep="\n")
    return 0


def _settings(
    args: argparse.Namespace, lines: list[Config], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    methods = [line.policy for line in lines]
    settings = settings_of(args, prompts, "repeats", "metered", "device", methods=methods)
    return {"configs": [line.key for line in lines]} | settings


COLUMNS = (
    "method knob verifier num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max tokens_per_second_low tokens_per_second_high speedup_over_plain "
    "speedup_over_plain_low speedup_over_plain_high speedup_over_hf_plain "
    "speedup_over_hf_assisted accepted_per_call tokens_per_call target_calls tokens "
    "outside_forwards emitted_kl_per_token largest_row_kl"
).split()
# column → head; the last columns are left out if the terminal is too narrow
HEADS = {
    "method": "method", "num_draft_tokens": "K", "speed": "tokens/s", "range": "90 %",
    "speedup_over_plain": "x plain", "kl": "KL/token", "accepted_per_call": "AL",
    "tokens_per_call": "tokens\n/call", "outside_forwards": "outside",
}  # fmt: skip
LEGEND = """\
x plain: median over repeats of the ratio to plain decoding in that repeat
AL: drafted tokens that are accepted per target call"""


def speeds(rows: Sequence[Row]) -> str:
    """Return a table for each batch size, with every method at its fastest K."""
    texts = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        title = f"\nbatch {batch}, every method at its fastest K on these texts"
        best = fastest(row for row in rows if row["batch"] == batch).values()
        tuned = sorted(best, key=lambda row: -row["tokens_per_second"])
        texts.append(columns([*map(_shown, tuned)], HEADS, title, needed="kl"))
    return "\n".join(texts)


def _shown(row: Row) -> Row:
    ends = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")
    speed, low, high = (f"{row[end]:,.{0 if row[end] >= 100 else 2}f}" for end in ends)
    names = {"method": method(row), "num_draft_tokens": row["num_draft_tokens"] or None}
    rest = list(HEADS)[list(HEADS).index("kl") + 1 :]
    names |= {head: f"{row[head]:.2f}" for head in rest if row[head] is not None}
    kl = 0.0 if row["method"] in BASELINES else row["emitted_kl_per_token"]
    return row | names | {"speed": speed, "range": f"{low}–{high}", "kl": kl}


def speed_rows(runs: Mapping[Config, Runs], seed: int = 0) -> list[Row]:
    """Return one dictionary per config.

    Speeds are medians over timed repeats, speed-ups are medians of ratios within a repeat. The
    columns ``_low`` and ``_high`` are the INTERVAL percentiles over resampled prompts or batches;
    all configs of a batch size have the same resamples.
    """
    return [_row(line, runs, seed) for line in runs]


def _row(line: Config, runs: Mapping[Config, Runs], seed: int) -> Row:
    line_runs = runs[line]
    draws = resamples(len(line_runs.timed[0]), seed)
    row: Row = dict.fromkeys(COLUMNS) | line.columns
    row |= {
        "tokens_per_second_min": float(line_runs.speeds.min()),
        "tokens_per_second_max": float(line_runs.speeds.max()),
        "tokens": line_runs.total("tokens"),
    }
    row |= spread("tokens_per_second", line_runs.speeds, line_runs.drawn(draws))
    for column, rival in (
        ("speedup_over_plain", Config(PLAIN, 0, batch=line.batch)),
        ("speedup_over_hf_plain", Config(HF_PLAIN, 0, batch=line.batch)),
        ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.num_draft_tokens, batch=line.batch)),
    ):
        if rival in runs:
            drawn = line_runs.drawn(draws) / runs[rival].drawn(draws)
            ratios = spread(column, line_runs.speeds / runs[rival].speeds, drawn)
            row |= {key: value for key, value in ratios.items() if key in row}
    if "target_calls" in line_runs.metered[0]:
        row |= {
            "target_calls": line_runs.total("target_calls"),
            "accepted_per_call": line_runs.ratio("accepted", "row_calls"),
            "tokens_per_call": line_runs.ratio("tokens", "row_calls"),
            "outside_forwards": line_runs.share([2, 3]),
        }
    if "kl" in line_runs.metered[0]:
        row |= {
            "emitted_kl_per_token": line_runs.ratio("kl", "tokens"),
            "largest_row_kl": max(record["largest_row_kl"] for record in line_runs.metered),
        }
    return row
