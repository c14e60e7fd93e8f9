"""The main job: two language models in, one table and two pictures out.

Logs both models' rows along text the target wrote, solves the optimal acceptance on one of
them three ways, audits every policy on all of them, decodes the same prompts with each
policy and reports what it cost. Writes everything to ``--out`` as CSV, JSON, PDF and PNG.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.tables import rule
from cactus_theory.decoding import load_pair
from cactus_theory.decoding.drafters import load

from .. import drafters
from ..common.decode import Harness
from ..common.grid import Grid, checked_policy, configs
from ..common.inputs import PAIR, add_pair_arguments, load_prompts
from ..common.results import columns, made, publish, write_json
from ..common.rows import log_rows
from .rows import audit_all, solve
from .table import measure

POLICIES = (
    "speculative",
    "typical",
    "cactus:delta=0.01",
    "cactus:delta=0.1",
    "cactus:delta=1",
    "cactus_exact:delta=0.1",
    "band:delta=0.1",
    "band:delta=0.5",
    "band:price=2",
    "band:price=0.5",
    "band:price=0.25",
)
# tokens sampled after each prompt, for the audited rows
LOGGED_TOKENS = 32
PICTURES = ("policies", "band_row")
# column of the table printed at the end → its head
SHOWN = {
    "policy": "policy",
    "knob": "knob",
    "num_draft_tokens": "K",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "accepted_per_call": "AL",
    "tokens_per_call": "tokens\n/call",
    "emitted_kl_per_token": "emitted KL\n/token",
    "largest_row_kl": "largest\nrow KL",
    "declares": "declared budget",
    "held": "held",
    "share_over_budget": "proposals\nover",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add_pair_arguments(parser)
    add(
        "--head", type=Path, help="folder of a head, beside the draft (for the shipped target, its)"
    )
    add("--num-prompts", type=int, default=8)
    add("--num-draft-tokens", type=int, nargs="+", default=[3, 7], metavar="K", help="to try")
    add("--max-new-tokens", type=int, default=48, metavar="N")
    add("--repeats", type=int, default=3, help="timed runs; their median is shown")
    add("--policies", nargs="+", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("demo"))
    add("--publish", type=Path, help="also write the CSV of the pictures here")


def run(args: argparse.Namespace) -> int:
    """Do the whole job; return 0."""
    specs = [checked_policy(spec) for spec in args.policies]  # a typo shows before anything runs
    pair = load_pair(args.target, args.draft)
    prompts = load_prompts(args.prompts, args.target)[: args.num_prompts]

    print(rule("rows along a real generation"))
    q, p = log_rows(pair.target, pair.draft, prompts, LOGGED_TOKENS, args.seed)
    overlap = torch.minimum(q, p).sum(-1).mean()
    print(
        f"{len(q)} rows of {q.shape[1]:,} tokens; the draft overlaps the target by "
        f"{overlap:.3f} (Σ min(p, q), mean)\n"
    )
    tables = {"band_row": solve(q, p, pair), "audit": audit_all(specs, q, p)}
    print(rule(f"decoding {len(prompts)} prompts, K of {args.num_draft_tokens} drafted a round"))
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    tables["policies"] = measure(
        harness, specs, widths=args.num_draft_tokens, repeats=args.repeats
    )  # fmt: skip
    print(_table(tables["policies"], args))
    if args.head is not None or args.target == PAIR / "target":
        found = {"draft": pair.draft, "head": load(args.head or PAIR / "recurrent")}
        every = configs([], [drafters.LOSSLESS], args.num_draft_tokens, [1])
        every = drafters.lines(list(found), every)
        grid = Grid(every, len(prompts), args.repeats, seed=args.seed)
        tables["drafters"] = drafters.rows(grid, drafters.decodes(harness, grid, found))
        best = [row for row in tables["drafters"] if row["fastest"]]
        print(
            columns(best, drafters.HEADS, "\nthe draft beside the head, lossless, at its fastest K")
        )
    _write(tables, args)
    return 0


def _table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    title = (
        f"each at its fastest K of {args.num_draft_tokens}; temperature 1, {args.num_prompts} "
        f"prompts, {args.max_new_tokens} new tokens, medians of {args.repeats} interleaved runs\n"
        "AL: drafted tokens that are accepted per target call"
    )
    return columns([row for row in rows if row["tuned"]], SHOWN, title)


def _write(tables: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    from paper_figures.__main__ import draw

    command = {"command": "python -m simulations demo"}
    for name, rows in tables.items():
        folders = filter(None, (args.out, args.publish if name in PICTURES else None))
        publish(args, rows, *(folder / f"{name}.csv" for folder in folders), **command)
    write_json(args.out / "demo.json", {"provenance": made(args, **command)} | tables)
    for name in PICTURES:
        draw(name, args.out, args.out)
    kinds = (".csv", ".json", ".png")
    files = sorted(path.name for path in args.out.iterdir() if path.suffix in kinds)
    print(f"written to {args.out}/: {', '.join(files)}")
