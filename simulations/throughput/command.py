"""Time policies and baselines on the same prompts; resume where a kill left off.

The default grid takes about 25 minutes on one core; --num-prompts 4 --repeats 3 --metered 1 takes
about one minute. Every decode is written to journal.jsonl under --out before the next decode
starts, and the tables (CSV) are made from that file alone. Every repeat decodes all prompts by all
methods in a shuffled order, with new seeds. Intervals are 90 % over resampled prompts; with few
prompts they are too narrow (8 prompts: 82 % coverage, 30 prompts: 88 %).

--verifier chain block decodes every policy token by token and, if possible, by whole drafted paths.
"""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from cactus_theory.base.prompts import Prompt
from cactus_theory.base.tables import width_of_terminal
from cactus_theory.commands.flags import given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding.drafters import holds_head, named_drafter

from ..common.answers import HEADS as ANSWERS
from ..common.answers import answer_rows
from ..common.decode import Harness
from ..common.grid import (
    BASELINES,
    HF_ASSISTED,
    USUAL,
    Config,
    Grid,
    Job,
    configs,
    fastest,
    method,
    name,
)
from ..common.inputs import add_decode_arguments, at_least, prompt_ids, settings_of
from ..common.journal import Journal
from ..common.results import WIDEST, columns, publish
from . import table

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

    def decoded(job: Job) -> dict[str, Any]:
        own = table.record(harness(), job, job.repeat < args.metered)
        return own | {"dtype": harness().pair.dtype}

    with Journal(args.out / "journal.jsonl", _settings(args, lines, prompts)) as journal:
        results = grid.fill(decoded, journal)
    runs = grid.runs(results)
    dtype = ", ".join(dict.fromkeys(str(one.get("dtype")) for one in results.values()))
    timed = args.repeats > 0
    tables = {"throughput": table.rows(runs, args.seed)}
    tables["answers"] = answer_rows(runs, len(prompts), timed=timed, seed=args.seed)
    for title, lines in tables.items():
        publish(args, lines, args.out / f"{title}.csv", dtype=dtype)
    files = ", ".join(["journal.jsonl", *(f"{title}.csv" for title in tables)])
    print(f"written to {args.out}/: {files}")
    print(show(tables))
    return 0


def _settings(
    args: argparse.Namespace, lines: list[Config], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    methods = [line.policy for line in lines]
    settings = settings_of(args, prompts, "repeats", "metered", "device", methods=methods)
    return {"configs": [line.key for line in lines]} | settings


# column → head; the last columns are left out if the terminal is too narrow
HEADS = {
    "method": "method", "num_draft_tokens": "K", "speed": "tokens/s", "range": "90 %",
    "speedup_over_plain": "x plain", "kl": "KL/token", "accepted_per_call": "AL",
    "tokens_per_call": "tokens\n/call", "target_nats_per_token": "nats\n/token",
    "outside_forwards": "outside",
}  # fmt: skip
Row = dict[str, Any]
LEGEND = """\
x plain: median over repeats of the ratio to plain decoding in that repeat
AL: drafted tokens that are accepted per target call
prompts needed: so many make x lossless differ from 1 at 95 %, in four of five such runs"""


def show(tables: Mapping[str, Sequence[Row]]) -> str:
    """Return the printed text: every method at its fastest K, and the lengths of answers."""
    width, texts = width_of_terminal(WIDEST), [speeds(tables["throughput"])]
    texts += [textwrap.fill(line, width, subsequent_indent="    ") for line in LEGEND.split("\n")]
    named, last = [row | {"name": name(row)} for row in tables["answers"]], "length_ratio_se"
    known = {column for row in named for column in row if row[column] not in (None, "")}
    heads = {column: head for column, head in ANSWERS.items() if column in known | {last}}
    texts.append(columns(named, heads, "\nwhole answers", last))
    return "\n".join(texts)


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
