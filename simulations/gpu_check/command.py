"""Check a CUDA machine from the checkout alone: is it right, how fast is it, what does it gain.

Sections run one after another, each in a process of its own, and share the time out among them;
the report is written after every section. Where time is short, ``agreement``, ``verify`` and
``decode`` are three commands, whose reports become one. ``--device cpu --tiny`` rehearses
all of it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..common.inputs import command_line
from ..common.results import provenance
from .device import device_name
from .page import verdict
from .report import FILES, Report, clear, source_hash
from .sections import SECTIONS, Budget, Note, Settings, chosen, run_apart, run_here

# seconds kept for writing the report at the end of a run
WRITING_S = 10.0
# sections whose tables are drawn
DRAWN = ("verify", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    known = "; ".join(f"{name}: {section.summary}" for name, section in SECTIONS.items())
    add("names", nargs="*", metavar="SECTION", help=known)
    add("--sections", nargs="+", default=[], metavar="NAME", help="the same")
    add("--device", default="cuda", help="cuda (default), or cpu for a rehearsal at tiny sizes")
    add("--tiny", action="store_true", help="the smallest sizes of everything")
    add("--minutes", type=float, default=8.0, help="for all sections together")
    add("--out", type=Path, default=Path("gpu_check"),
        help="sections that ran there before, on this machine and code, are kept")  # fmt: skip
    add("--target", type=Path, help="decode with this checkpoint and --draft instead")
    add("--draft", type=Path)
    add("--prompts", type=Path, help="JSON lines; lines with question and answer are scored")
    add("--num-prompts", type=int, default=8, help="of them, with --target")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="a text, with --target")
    add("--seed", type=int, default=0)
    add("--one-process", action="store_true", help="run the sections in this process")


def run(args: argparse.Namespace) -> int:
    """Run the sections and write the report; return 1 if a check or a section failed."""
    names, settings = chosen(args.names + args.sections), _settings(args)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was checked (--device cpu --tiny rehearses it)")
        return 0
    made = provenance(command_line("gpu-check", add_arguments, args))
    made |= {"device": device_name(torch.device(settings.device))}
    made |= {"source": source_hash()} | ({"tiny": "yes"} if settings.tiny else {})
    report, budget = Report(made), Budget(60 * args.minutes - WRITING_S)
    report.take_up(args.out, names)
    clear(args.out)
    if report.tables:
        report.write(args.out, picture=any(name in DRAWN for name in report.tables))
    todo = {name: SECTIONS[name].weight for name in names}
    for name in names:
        print(f"── {name}: {SECTIONS[name].summary}", flush=True)
        _run(name, settings, report, budget.share(name, todo), here=args.one_process)
        del todo[name]
        report.write(args.out, picture=name in DRAWN and name in report.tables)
    _conclude(report, args.out)
    return 1 if report.failed else 0


def _settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the sections.

    Raises
    ------
    ValueError
        One folder of a pair without the other, no minutes, no prompts, no tokens.
    """
    if (args.target is None) != (args.draft is None):
        raise ValueError("--target: must come with --draft, and --draft with --target")
    least = {"--minutes": args.minutes, "--num-prompts": args.num_prompts}
    for flag, value in (least | {"--max-new-tokens": args.max_new_tokens}).items():
        if not value > 0:
            raise ValueError(f"{flag}: must be above 0; got {value:g}")
    own = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return Settings(**own | {"tiny": args.tiny or args.device == "cpu"})


def _run(name: str, settings: Settings, report: Report, seconds: float, *, here: bool) -> None:
    started = time.monotonic()
    for message in (run_here if here else run_apart)(name, settings, report.tables, seconds):
        report.add(name, message)
        print(_line(message), flush=True)
    report.seconds[name] = time.monotonic() - started


def _line(message: Any) -> str:
    if isinstance(message, Note):
        return f"{message.kind}: {message.what}: {message.why}"
    values = (value for value in message.values() if value is not None)
    return "  ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)


def _conclude(report: Report, out: Path) -> None:
    print("\na rehearsal: no speed here means anything" * ("tiny" in report.provenance))
    print("\n".join(verdict(report.tables, report.notes)))
    for row in report.tables.get("goals", []):
        measured = "" if row["measured"] is None else f" ({row['measured']:.3g} {row['unit']})"
        print(f"{row['verdict']}: {row['goal']}, needed {row['needed']}{measured}")
    files = [name for name in FILES if (out / name).is_file()]
    print(f"written to {out}/: {', '.join(files)}")
