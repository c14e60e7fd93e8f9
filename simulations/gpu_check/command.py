"""Try a CUDA machine in five minutes: the kernels' laws, one verification, whole decodes.

Every piece runs in a separate process with a time limit, so that a fault or a hang ends only this
piece; naming a piece runs it alone. Tables are written row by row, under the names that the figure
reads: copy them into ``paper_figures/data`` for ``make figures``. Laws are checked by
``pytest -m gpu``. ``--device cpu`` rehearses everything at the smallest sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cactus_theory.base.files import first_line

from ..common.results import publish
from .timings import Bench, Job, decodes, facts, verifications

# most seconds of all pieces together
ALL = 300
# most faults that are repeated at the end
FAULTS = 8
# parallel processes of a piece of tests
PROCESSES = 6
# warnings are no errors here: a new machine's libraries may warn of things unrelated to the kernels
TESTS = ("-m", "pytest", "-v", "--tb=short", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu")
COMPILES = ("-m", "tests.kernels.hopper", "--steps", "large", "verify")


@dataclass(frozen=True)
class Piece:
    """A piece of the check: a time limit, and Python's arguments or the jobs of a table."""

    seconds: int
    python: tuple[str, ...] = ()
    table: str = ""
    jobs: Callable[[Bench], Iterator[Job]] | None = None


PIECES = {
    "compile": Piece(45, COMPILES),
    "laws": Piece(60, (*TESTS, "tests/kernels", "-k", "151936 or exact_laws")),
    "verify": Piece(60, table="gpu_verify", jobs=verifications),
    "decode": Piece(70, table="gpu_decode", jobs=decodes),
    "loop": Piece(45, (*TESTS, "tests/decoding/device", "tests/simulations/gpu_check")),
    "small": Piece(45, (*TESTS, "tests/kernels", "-k", "not (151936 or exact_laws)")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (all without)")
    add("--device", default="cuda", help="cuda (default), or cpu for a rehearsal at tiny sizes")
    add("--out", type=Path, default=Path("gpu_check"))
    add("--seed", type=int, default=0)
    add("--here", action="store_true", help="one piece of a table, in this process and untimed")


def run(args: argparse.Namespace) -> int:
    for name in args.pieces:
        if name not in PIECES:
            raise ValueError(f"PIECE: must be among {', '.join(PIECES)}; got {name!r}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no GPU here, nothing was timed (--device cpu rehearses it)")
        return 0
    if args.here:
        return max(_table(args, PIECES[name]) for name in args.pieces or _tables())
    args.out.mkdir(parents=True, exist_ok=True)
    began, lines, failed = time.monotonic(), [], False
    for name in args.pieces or PIECES:
        left = ALL - (time.monotonic() - began)
        line, good = _piece(args, name, min(PIECES[name].seconds, left))
        failed |= not good
        lines.append(line)
        print(line, flush=True)
    print("\n".join(("", *lines, *_faults(args.out)[:FAULTS])))
    return int(failed)


def _tables() -> list[str]:
    return [name for name, piece in PIECES.items() if piece.jobs]


def _piece(args: argparse.Namespace, name: str, limit: float) -> tuple[str, bool]:
    """Run a piece in a new process group; return a line about its end, and whether it passed."""
    if limit <= 0:
        return f"{name:<10} not run: {ALL} s are over", False
    piece, log, began = PIECES[name], args.out / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        words, both = _command(args, name, piece), subprocess.STDOUT
        child = subprocess.Popen(words, stdout=file, stderr=both, start_new_session=True)
        try:
            code = child.wait(limit)
            how = "well" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            code, how = -1, f"stopped after {limit:.0f} s"
        finally:  # kills also the piece's child processes, and also after Ctrl-C here
            _kill(child)
    took = time.monotonic() - began
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""]
    return f"{name:<10} {how}, {took:.1f} s: {said[-1].strip('= ')[:90]} ({log})", code == 0


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _command(args: argparse.Namespace, name: str, piece: Piece) -> list[str]:
    here = ["--device", args.device, "--out", str(args.out), "--seed", str(args.seed), "--here"]
    if piece.jobs:
        return [sys.executable, "-m", "simulations", "gpu-check", name, *here]
    if piece.python != COMPILES:
        # compiling takes most of the time, so tests run in parallel if pytest-xdist is installed
        several = importlib.util.find_spec("xdist") and not args.device.startswith("cpu")
        return [sys.executable, *piece.python, *(["-n", str(PROCESSES)] if several else [])]
    few = ["--few", "--jobs", "1"] * args.device.startswith("cpu")
    return [sys.executable, *piece.python, *few, "--out", str(args.out / "gpu_kernels.csv")]


def _table(args: argparse.Namespace, piece: Piece) -> int:
    """Make the table of a piece, saved after every row; return 1 if a job failed."""
    bench, rows, failed = Bench(torch.device(args.device), args.seed), [], 0
    if piece.jobs is None:
        raise ValueError(f"--here: must be of a piece among {', '.join(_tables())}; got a check")
    about, began = facts(bench), time.monotonic()
    for what, job in piece.jobs(bench):
        try:
            rows.append(job())
        except Exception as error:  # a first run on a new machine may raise anything
            failed += 1
            print(f"{what}: {type(error).__name__}: {first_line(error)}", flush=True)
            continue
        publish(args, rows, args.out / f"{piece.table}.csv", **about)
        print(f"{what}: done after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(rows)} rows, {failed} failed")
    return int(failed > 0)


def _faults(out: Path) -> list[str]:
    lines = []
    for log in sorted(out.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")) or "Error: " in line.partition(": ")[2][:40]:
                lines.append(f"{log.stem}: {line[:110]}")
    return lines
