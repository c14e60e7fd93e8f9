"""The main job: two language models in, one table and two pictures out.

Logs both models' rows along text the target wrote, solves the optimal acceptance on one of
them three ways, audits every policy on all of them, decodes the same prompts with each
policy and says what it cost. Writes everything to ``--out`` as CSV, JSON, PDF and PNG.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import cactus_theory as ct
from cactus_theory.decoding import Pair, load_pair

from .decode_table import measure, run_count
from .results import provenance, write_csv, write_json
from .rows import load_prompts, log_rows
from .terminal import empty_table, shown

HERE = Path(__file__).resolve().parent
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
SOLVED_DELTA = 0.1
LOGGED_TOKENS = 32
# a row worth drawing: lossless sampling refuses a fair share, and many tokens are in play
DRAWN_REJECTIONS = (0.3, 0.5)
PICTURES = ("policies", "band_row")
TABLE_WIDTH = 148
PROGRAM_TOLERANCE = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--target", type=Path, default=HERE / "pair" / "target", help="target model folder")
    add("--draft", type=Path, default=HERE / "pair" / "draft", help="draft model folder")
    add("--prompts", type=Path, default=HERE / "data" / "prompts.jsonl", help="JSON lines")
    add("--num-prompts", type=int, default=8)
    add("--num-draft-tokens", type=int, nargs="+", default=[3, 7], metavar="K", help="to try")
    add("--max-new-tokens", type=int, default=48, metavar="N")
    add("--repeats", type=int, default=3, help="timed runs; their median is shown")
    add("--policies", nargs="+", default=list(POLICIES), metavar="SPEC")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("demo"))
    add("--publish", type=Path, help="also write the CSV behind the pictures here")


def run(args: argparse.Namespace) -> int:
    """Do the whole job; return 0."""
    torch.set_num_threads(args.threads)
    console = Console()
    if console.width < TABLE_WIDTH:  # a wrapped line reads better than a cut number
        console = Console(width=TABLE_WIDTH)
    for spec in args.policies:
        ct.policy(spec)  # a typo shows before anything runs
    pair = load_pair(args.target, args.draft)
    prompts = load_prompts(args.prompts, args.target)[: args.num_prompts]
    source = provenance("python -m simulations demo")

    console.rule("rows along a real generation")
    q, p = log_rows(pair.target, pair.draft, prompts, LOGGED_TOKENS, args.seed)
    overlap = torch.minimum(q, p).sum(-1).mean()
    console.print(
        f"{len(q)} rows of {q.shape[1]:,} tokens; the draft overlaps the target by "
        f"{overlap:.3f} (Σ min(p, q), mean)"
    )
    row = _solve_one(console, q, p, pair)
    tables = {"band_row": row}
    tables["audit"] = _audit_all(console, args.policies, q, p)
    tables["policies"] = _decode_all(console, args, pair, prompts)
    console.print(_table(tables["policies"], args))
    for name, rows in tables.items():
        write_csv(args.out / f"{name}.csv", rows, source)
    write_json(args.out / "demo.json", {"provenance": source} | tables)
    if args.publish is not None:
        for name in PICTURES:
            write_csv(args.publish / f"{name}.csv", tables[name], source)
    _draw(console, args.out)
    return 0


def _solve_one(console: Console, q: Tensor, p: Tensor, pair: Pair) -> list[dict[str, Any]]:
    """Solve one row by closed form, certificate and convex program, side by side."""
    from solvers import optimal

    console.rule(f"the optimal acceptance on one row, KL ≤ {SOLVED_DELTA} nats")
    rejected = (q - p).clamp(min=0.0).sum(-1)
    row = _row_to_draw(q, rejected)
    started = time.perf_counter()
    closed = ct.optimal_acceptance(q[row], p[row], delta=SOLVED_DELTA)
    elapsed = time.perf_counter() - started
    program = optimal.solve(q[row].numpy(), p[row].numpy(), divergence="kl", delta=SOLVED_DELTA)
    distance = abs(float(closed.acceptance) - program.acceptance)
    table = empty_table("", "acceptance", "price dA/dδ", "proof of optimality", "seconds")
    table.add_row("lossless", f"{1 - float(rejected[row]):.9f}", "", "", "")
    table.add_row(
        "closed form",
        f"{float(closed.acceptance):.9f}",
        f"{float(closed.price):.6f}",
        f"certificate gap {float(closed.gap):.1e}",
        f"{elapsed:.4f}",
    )
    table.add_row(
        f"cvxpy ({program.solver})",
        f"{program.acceptance:.9f}",
        f"{program.price:.6f}",
        f"dual gap {program.gap:.1e}",
        f"{program.seconds:.4f}",
    )
    console.print(table)
    agree = "agree" if distance <= PROGRAM_TOLERANCE else "DISAGREE"
    console.print(f"closed form and program {agree}: they differ by {distance:.1e}")
    return _row_records(q[row], p[row], closed, pair)


def _row_to_draw(q: Tensor, rejected: Tensor) -> int:
    """Return the row of largest entropy among those with a fair share of rejections."""
    low, high = DRAWN_REJECTIONS
    entropy = -torch.xlogy(q, q).sum(-1)
    fair = (rejected >= low) & (rejected <= high)
    if not bool(fair.any()):
        return int(rejected.argmax())
    return int(torch.where(fair, entropy, -1.0).argmax())


def _row_records(
    q: Tensor, p: Tensor, closed: ct.OptimalAcceptance, pair: Pair
) -> list[dict[str, Any]]:
    """Return the row's tokens in order of p/q, with what Cactus really emits beside the band."""
    emitted = ct.emitted_law(ct.policy("cactus", delta=SOLVED_DELTA), q, p)
    order = (p / q).argsort()
    cumulative = q[order].cumsum(0)
    shown = torch.maximum(q, p)[order] > 1e-4
    return [
        {
            "token": repr(pair.tokenizer.decode([int(token)])),
            "target_mass_below": float(below - q[token]),
            "q": float(q[token]),
            "p": float(p[token]),
            "band": float(closed.target[token]),
            "cactus": float(emitted[token]),
            "lower": float(closed.lower),
            "upper": float(closed.upper),
            "delta": SOLVED_DELTA,
            "acceptance": float(closed.acceptance),
            "speculative": float(torch.minimum(q, p).sum()),
        }
        for token, below in zip(order[shown], cumulative[shown], strict=True)
    ]


def _audit_all(
    console: Console, specs: Sequence[str], q: Tensor, p: Tensor
) -> list[dict[str, Any]]:
    """Audit every policy on every logged row, exactly."""
    console.rule("what every policy really emits on those rows (exact, nothing sampled)")
    table = empty_table(
        "policy", "acceptance", "emitted\nKL", "largest", "best\nacceptance\nat that KL",
        "least KL\nat that\nacceptance", "declared budget", "held", "proposals\nover",
    )  # fmt: skip
    records = []
    for spec in specs:
        record = _audited(ct.policy(spec), q, p)
        records.append(record)
        table.add_row(*(shown(record[key]) for key in record))
    console.print(table)
    return records


def _audited(rule: ct.Policy, q: Tensor, p: Tensor) -> dict[str, Any]:
    audit = ct.audit(rule, q, p)
    kl, budget = audit.divergences["kl"], rule.declares.budget
    return {
        "policy": rule.spec,
        "acceptance": float(audit.acceptance.mean()),
        "emitted_kl": float(kl.mean()),
        "largest_emitted_kl": float(kl.max()),
        "best_acceptance_at_that_kl": float(audit.optimum_acceptance.mean()),
        "least_kl_at_that_acceptance": float(np.nanmean(audit.optimum_divergence)),
        "declares": "no budget" if budget is None else str(budget),
        "held": None if audit.within is None else bool(audit.within.all()),
        "share_over_budget": None if audit.over_share is None else float(audit.over_share.mean()),
    }


def _decode_all(
    console: Console, args: argparse.Namespace, pair: Pair, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    widths = args.num_draft_tokens
    console.rule(f"decoding {len(prompts)} prompts, K of {widths} drafted tokens a round")
    with Progress(console=console, transient=True) as progress:
        total = run_count(len(prompts), len(args.policies), len(widths), args.repeats)
        task = progress.add_task("decoding", total=total)
        return measure(
            pair,
            prompts,
            args.policies,
            widths=widths,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            seed=args.seed,
            on_run=lambda: progress.advance(task),
        )


def _table(rows: list[dict[str, Any]], args: argparse.Namespace) -> Table:
    table = empty_table(
        "policy", "knob", "K", "tokens/s", "speed-up", "AL", "tokens\n/call", "emitted KL\n/token",
        "largest\nrow KL", "declared budget", "held", "proposals\nover",
    )  # fmt: skip
    table.title = (
        f"each at its fastest K of {args.num_draft_tokens}; temperature 1, {args.num_prompts} "
        f"prompts, {args.max_new_tokens} new tokens, medians of {args.repeats} interleaved runs"
    )
    keys = (
        "policy knob num_draft_tokens tokens_per_second speedup accepted_per_call tokens_per_call "
        "emitted_kl_per_token largest_row_kl declares held share_over_budget"
    ).split()
    for row in filter(lambda row: row["tuned"], rows):
        table.add_row(*(shown(row[key]) for key in keys))
    return table


def _draw(console: Console, out: Path) -> None:
    from paper_figures.__main__ import draw

    for name in PICTURES:
        draw(name, out, out)
    files = sorted(path.name for path in out.iterdir() if path.suffix in (".csv", ".json", ".png"))
    console.print(f"written to {out}/: {', '.join(files)}")
