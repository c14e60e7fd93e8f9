"""Recompute every committed CSV by its own command, into --out; --list shows the commands.

--quick takes small settings: the same columns from fewer rows, to see that every command works.
Nothing in paper_figures is touched. A command that fails is told, and the others go on. Each
command's output is in OUT/logs, the seconds it took in OUT/seconds.csv; commands that resume
take up what is in OUT/made, so name another folder to begin anew. Numbers of a GPU are made by
gpu-check.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base.files import FolderLock

from ..common.inputs import DATA, ROOT
from ..common.progress import Progress
from ..common.results import publish, read_csv, write_bytes
from ..common.terminal import text_table
from .entries import ENTRIES, Entry

# what comes of an entry
DONE, LEFT_OUT, FAILED = "done", "left out", "failed"
# what is known of the times in entries.py
TIMES = (
    "(times: one run of each full command, 2026-11-22; the tables made then name a 2-core Intel "
    "Xeon.\nOf overspend and design_example, whose tables are older, the machine is unknown)"
)
# of a machine with other work to do, the second says more
CLOCKS = ("seconds", "processor_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="small settings: minutes, not an hour",
    )
    add("--list", action="store_true", help="print the commands and run none")
    add("--only", nargs="+", metavar="NAME", help="tables, by name without .csv")
    add("--shared", type=Path, default=ROOT / "shared", metavar="DIR",
        help="where models/stories260K, models/stories-xs-281K and prompts/ are")  # fmt: skip
    add("--out", type=Path, default=Path("build/all"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Run the commands one after the other; return 1 if any failed."""
    chosen = _chosen(args.only)
    if args.list:
        print(listed(chosen, args.quick))
        return 0
    rows: list[dict[str, Any]] = []
    with FolderLock(args.out), Progress("recomputing", len(chosen)) as progress:
        for entry in chosen:
            progress.update(len(rows), entry.name)
            begun = np.array(_clocks())
            state, note = recompute(entry, args)
            seconds = dict(zip(CLOCKS, (_clocks() - begun).tolist(), strict=True))
            rows.append({"name": entry.name} | seconds | {"state": state, "note": note})
            progress.update(len(rows), entry.name)
    publish(args, rows, args.out / "seconds.csv")
    print(_told(rows))
    print(f"tables in {args.out}")
    return 1 if any(row["state"] == FAILED for row in rows) else 0


def recompute(entry: Entry, args: argparse.Namespace) -> tuple[str, str]:
    """Run an entry's commands and put its tables under ``args.out``; return state and a note."""
    if entry.needs_shared and not (args.shared / "models").is_dir():
        return LEFT_OUT, f"needs models in {args.shared} (--shared)"
    made = (args.out / "made" / ("quick" if args.quick else "full") / entry.name).resolve()
    made.mkdir(parents=True, exist_ok=True)
    first = next(iter(entry.names.values()))
    places = {"made": made, "csv": made / f"{first}.csv", "root": ROOT}
    places["shared"] = args.shared.resolve()
    log = args.out / "logs" / f"{entry.name}.txt"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    for words in entry.commands(args.quick, **{name: str(path) for name, path in places.items()}):
        if code := _run(words, log):
            return FAILED, f"status {code}: {_last_line(log)}"
    return _collected(entry, made, args.out)


def listed(entries: Sequence[Entry], quick: bool) -> str:
    """Return each entry's tables, how long it took, and its commands."""
    parts = [] if quick else [TIMES]
    for entry in entries:
        took = "" if quick else f"  ({entry.took or 'not measured'})"
        needs = "  [not in a clone: needs --shared DIR with other models]" * entry.needs_shared
        parts.append(f"{' '.join(entry.names)}{took}{needs}")
        for words in entry.commands(quick, csv="OUT.csv", made="OUT", root=".", shared="shared"):
            parts.append(f"    python -m simulations {' '.join(words)}")
    return "\n".join(parts)


def _told(rows: Sequence[dict[str, Any]]) -> str:
    total = {"name": "all", "state": "", "note": ""}
    total |= {clock: sum(row[clock] for row in rows) for clock in CLOCKS}
    heads = ("method", "", "seconds", "of a\nprocessor", "policy")
    cells = [
        [row["name"], row["state"], *(f"{row[clock]:.1f}" for clock in CLOCKS), row["note"]]
        for row in [*rows, total]
    ]
    return text_table(heads, cells)


def _clocks() -> tuple[float, float]:
    """Return the wall clock, and the processor seconds of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), used.ru_utime + used.ru_stime


def _chosen(names: Sequence[str] | None) -> list[Entry]:
    known = {name for entry in ENTRIES for name in entry.names}
    if unknown := set(names or ()) - known:
        raise ValueError(
            f"--only: must be among {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}"
        )
    return [entry for entry in ENTRIES if names is None or set(entry.names) & set(names)]


def _run(words: Sequence[str], log: Path) -> int:
    """Run a command with its output in ``log``; return its status."""
    with log.open("a", encoding="utf-8") as file:
        print(f"$ python -m simulations {' '.join(words)}", file=file, flush=True)
        command = [sys.executable, "-m", "simulations", *words]
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode


def _collected(entry: Entry, made: Path, out: Path) -> tuple[str, str]:
    """Copy the tables that were made; say where their columns are not the committed ones."""
    notes = []
    for name, own in entry.names.items():
        if not (made / f"{own}.csv").is_file():
            return FAILED, f"{name}: no such table was made"
        write_bytes(out / f"{name}.csv", (made / f"{own}.csv").read_bytes())
        if _columns(out / f"{name}.csv") != _columns(DATA / f"{name}.csv"):
            notes.append(f"{name}: columns are not those of the committed table")
    return DONE, "; ".join(notes)


def _columns(path: Path) -> list[str]:
    return list(read_csv(path)[0][0])


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1]
