"""Check a CUDA machine from the checkout alone: is it right, how fast is it, what does it gain.

Sections run one after another, each in a process of its own, and share the time out among them;
the report is written after every section, in six files at most, each whole or not:
``gpu_check.html`` is the page to read, ``gpu_check.json`` holds everything. The three tables and
the picture go by the names that the figures know: copied into ``paper_figures/data``, they are
what ``make figures`` draws. Where time is short, ``agreement``, ``verify`` and ``decode`` are
three commands, whose reports become one. ``--device cpu --tiny`` rehearses all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..common.inputs import code_digest, command_line
from ..common.results import filled, provenance, write_bytes, write_csv, write_json, write_text
from .device import device_name
from .page import page, verdict
from .sections import (
    SECTIONS,
    Budget,
    Message,
    Note,
    Row,
    Settings,
    run_apart,
    run_here,
    section_names,
)

# section: the table that is committed when it was measured on a GPU
TABLES = {"agreement": "gpu_checks", "verify": "gpu_verify", "decode": "gpu_decode"}
PICTURE = "gpu"
PAGE, WHOLE = "gpu_check.html", "gpu_check.json"
FILES = (PAGE, WHOLE, f"{PICTURE}.png", *(f"{name}.csv" for name in TABLES.values()))


@dataclass
class Report:
    """Tables by section, notes, seconds of finished sections, the picture as last drawn."""

    provenance: dict[str, str]
    tables: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    picture: bytes | None = None

    def add(self, section: str, message: Message) -> None:
        if isinstance(message, Note):
            self.notes.append(replace(message, section=section))
        else:
            row = {key: _plain(value) for key, value in message.items()}
            self.tables.setdefault(section, []).append(row)

    def take_up(self, out: Path, names: Sequence[str]) -> None:
        """Keep what sections other than ``names`` gave, if the same machine and code wrote it."""
        if not (out / WHOLE).is_file():
            return
        earlier = json.loads((out / WHOLE).read_text(encoding="utf-8"))
        origin = earlier["provenance"]
        if any(origin.get(key) != self.provenance.get(key) for key in ("device", "source", "tiny")):
            return
        for name, rows in earlier["tables"].items():
            if name not in names:
                self.tables[name] = rows
        self.seconds = {k: s for k, s in earlier["seconds"].items() if k not in names}
        self.notes = [Note(**note) for note in earlier["notes"] if note["section"] in self.seconds]
        if self.seconds:
            self.provenance["command"] = f"{origin['command']}; {self.provenance['command']}"

    @property
    def failed(self) -> bool:
        """Return whether a check did not pass, or something did not run to its end."""
        check_failed = any(row["passed"] is False for row in self.tables.get("agreement", ()))
        return check_failed or any(note.kind == "failed" for note in self.notes)

    def write(self, out: Path, picture: bool) -> None:
        """Write what there is; ``picture`` says whether to draw anew."""
        for section, name in TABLES.items():
            if self.tables.get(section):
                write_csv(out / f"{name}.csv", filled(self.tables[section]), self.provenance)
        if picture:
            self.picture = self._drawn(out)
        content = {
            "provenance": self.provenance,
            "verdict": verdict(self.tables, self.notes),
            "seconds": self.seconds,
            "tables": self.tables,
            "notes": [vars(note) for note in self.notes],
        }
        write_json(out / WHOLE, content)
        write_text(out / PAGE, page(content, self.picture))

    def _drawn(self, out: Path) -> bytes | None:
        """Draw the figure from the tables as written, if there is something to draw with."""
        from paper_figures.__main__ import draw

        with tempfile.TemporaryDirectory() as folder:
            try:
                draw(PICTURE, out, Path(folder))
            except ValueError as error:  # matplotlib is not there
                self.notes.append(Note("skipped", "pictures", str(error)))
                return None
            content = (Path(folder) / f"{PICTURE}.png").read_bytes()
        write_bytes(out / f"{PICTURE}.png", content)
        return content


def clear(out: Path) -> None:
    """Remove what an earlier run wrote, so that the folder holds what is in the report only."""
    for name in FILES:
        (out / name).unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Return a value that JSON has: NaN and infinity as text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# the code that a report is of
SOURCE = ("cactus_theory/**/*.py", "simulations/gpu_check/*.py")
# seconds kept for writing the report at the end of a run
WRITING_S = 10.0
# sections whose tables are drawn
DRAWN = ("verify", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    section_help = "; ".join(f"{name}: {section.summary}" for name, section in SECTIONS.items())
    add("names", nargs="*", metavar="SECTION", help=section_help)
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
    names, settings = section_names(args.names + args.sections), _settings(args)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was checked (--device cpu --tiny rehearses it)")
        return 0
    origin = provenance(command_line("gpu-check", add_arguments, args))
    origin |= {"device": device_name(torch.device(settings.device))}
    origin |= {"source": code_digest(*SOURCE)} | ({"tiny": "yes"} if settings.tiny else {})
    report, budget = Report(origin), Budget(60 * args.minutes - WRITING_S)
    report.take_up(args.out, names)
    clear(args.out)
    if report.tables:
        report.write(args.out, picture=any(name in DRAWN for name in report.tables))
    todo = {name: SECTIONS[name].weight for name in names}
    for name in names:
        print(f"── {name}: {SECTIONS[name].summary}", flush=True)
        _run(name, settings, report, budget.share(name, todo), inline=args.one_process)
        del todo[name]
        report.write(args.out, picture=name in DRAWN and name in report.tables)
    _conclude(report, args.out)
    return 1 if report.failed else 0


def _settings(args: argparse.Namespace) -> Settings:
    if (args.target is None) != (args.draft is None):
        raise ValueError("--target: must come with --draft, and --draft with --target")
    least = {"--minutes": args.minutes, "--num-prompts": args.num_prompts}
    for flag, value in (least | {"--max-new-tokens": args.max_new_tokens}).items():
        if not value > 0:
            raise ValueError(f"{flag}: must be above 0; got {value:g}")
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return Settings(**values | {"tiny": args.tiny or args.device == "cpu"})


def _run(name: str, settings: Settings, report: Report, seconds: float, *, inline: bool) -> None:
    start = time.monotonic()
    for message in (run_here if inline else run_apart)(name, settings, report.tables, seconds):
        report.add(name, message)
        print(_line(message), flush=True)
    report.seconds[name] = time.monotonic() - start


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
