"""Time policies and baselines on the same prompts; resume where a kill left off.

Every decode is written to ``journal.jsonl`` under ``--out`` before the next one starts. The
table (CSV and JSON) and its picture are made from that file alone.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from cactus_theory.decoding import load_pair

from ..results import provenance, write_csv, write_json
from ..rows import prompts_of
from ..terminal import empty_table, shown
from . import table
from .grid import Config, configs, described, jobs
from .journal import Journal
from .methods import Work, decode

HERE = Path(__file__).resolve().parents[1]
BASELINES = ("plain", "hf_plain", "hf_assisted", "hf_mixture:0.5")
POLICIES = (
    "speculative",
    "tempered:temperature=0.9",
    "truncated:top_p=0.95",
    "mixture:alpha=0.5",
    "typical",
    "cactus:delta=0.002",
    "cactus:delta=0.01",
    "cactus:delta=0.1",
    "cactus:delta=1",
    "band:delta=0.1",
    "band:price=2",
    "band:price=1",
    "band:price=0.7",
    "band:price=0.5",
)
SHOWN = {
    "method": "method",
    "knob": "knob",
    "num_draft_tokens": "K",
    "batch": "batch",
    "tokens_per_second": "tokens/s",
    "speedup_over_plain": "speed-up\nover plain",
    "speedup_over_hf_assisted": "over HF\nassisted",
    "accepted_per_call": "AL",
    "tokens_per_call": "tokens\n/call",
    "outside_forwards": "outside\nforwards",
    "emitted_kl_per_token": "emitted KL\n/token",
    "target_nats_per_token": "target nats\n/token",
    "parses": "parses",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--target", type=Path, default=HERE / "pair" / "target", help="target model folder")
    add("--draft", type=Path, default=HERE / "pair" / "draft", help="draft model folder")
    add("--prompts", type=Path, default=HERE / "data" / "prompts.jsonl", help="JSON lines")
    add("--num-prompts", type=int, default=16)
    add("--policies", nargs="*", default=list(POLICIES), metavar="SPEC")
    add("--baselines", nargs="*", default=list(BASELINES), metavar="NAME")
    add("--num-draft-tokens", type=int, nargs="+", default=[3, 7], metavar="K")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--repeats", type=int, default=3, help="timed repeats after one untimed, metered one")
    add("--seed", type=int, default=0)
    add("--device", default="cpu")
    add("--threads", type=int, default=1, help="of torch; one is best for small models")
    add("--out", type=Path, default=Path("throughput"))
    add("--publish", type=Path, help="also write throughput.csv here")


def run(args: argparse.Namespace) -> int:
    """Make what is missing, then the table; return 0."""
    torch.set_num_threads(args.threads)
    lines = configs(args.baselines, args.policies, args.num_draft_tokens, args.batch)
    texts = prompts_of(args.prompts)[: args.num_prompts]
    pair = load_pair(args.target, args.draft, device=args.device)
    ids = [pair.tokenizer(text)["input_ids"] for text in texts]
    work = Work(pair, texts, ids, args.max_new_tokens, args.seed)
    console = Console(width=max(Console().width, 160))
    with Journal(args.out / "journal.jsonl", _settings(args, lines, texts)) as journal:
        _fill(console, journal, work, lines, args.repeats)
        groups = {batch: math.ceil(len(texts) / batch) for batch in args.batch}
        rows = table.rows(lines, groups, args.repeats, journal.results)
    source = provenance("python -m simulations throughput")
    write_csv(args.out / "throughput.csv", rows, source)
    write_json(args.out / "throughput.json", {"provenance": source, "rows": rows})
    if args.publish is not None:
        write_csv(args.publish / "throughput.csv", rows, source)
    _print(console, rows)
    console.print(f"written to {args.out}/: journal.jsonl, throughput.csv, throughput.json")
    return 0


def _fill(
    console: Console, journal: Journal, work: Work, lines: list[Config], repeats: int
) -> None:
    """Make every decode that the journal lacks, showing progress."""
    todo = list(jobs(lines, len(work.ids), repeats))
    missing = [job for job in todo if job.key not in journal.results]
    if len(missing) < len(todo):
        console.print(f"{len(todo) - len(missing)} of {len(todo)} decodes are there already")
    for config in {job.config for job in missing}:  # first calls allocate and compile
        decode(work, config, 0, metered=False)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(todo), completed=len(todo) - len(missing))
        for job in missing:
            journal.add(job.key, decode(work, job.config, job.group, metered=job.repeat == 0))
            progress.advance(task)


def _settings(args: argparse.Namespace, lines: list[Config], texts: list[str]) -> dict[str, Any]:
    """Return all that decides a result, so that two runs are never mixed."""
    return {
        "configs": described(lines),
        "prompts": _digest("\0".join(texts).encode()),
        "target": _folder_digest(args.target),
        "draft": _folder_digest(args.draft),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "seed": args.seed,
        "device": args.device,
        "threads": args.threads,
    }


def _folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return _digest(b"".join(path.name.encode() + path.read_bytes() for path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    view = empty_table(*SHOWN.values())
    for row in rows:
        view.add_row(*(shown(row[name]) for name in SHOWN))
    console.print(view)
