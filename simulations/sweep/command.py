"""Run a grid of policies, verifiers and knobs on this machine or many; resume after any kill.

Kinds of tasks: replay (a trace, exact), markov (whole texts of tiny models, exact), decode (a
pair of models, metered). A policy whose knob has no value, such as band:price, takes each of
--knobs. A grid file is JSON: {"kind": "replay", "policies": ["band:price"], "knobs": [1, 2]}.

Finished tasks are kept in shards under --out before more are handed out; the same command goes
on from there, on this machine or another. sweep.csv has the grid's order and the same bytes
wherever its tasks ran, on processors of one kind.

Other machines: start "dask scheduler" anywhere, and in a checkout of the same commit on each
machine "PYTHONPATH=. dask worker ADDRESS --nworkers N --nthreads 1" (extra sweep). A worker
runs one task at a time. Shipped models and traces are found in each worker's own checkout;
others must lie at the same absolute path everywhere. Workers compare files with those that the
sweep was planned with, and their code and versions with the command's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cactus_theory._flags import add_trust

from ..common.inputs import command_line
from ..common.progress import Progress
from ..common.results import provenance
from .drive import drive
from .places import IN_PROCESS, PROCESSES
from .plan import add_grid_arguments, from_file, grid_of, planned
from .store import Store
from .work import release

# flags that say where and how, not what
ELSEWHERE = ("out", "workers", "in_process", "scheduler", "patience", "grid", "trust_code")
SHOWN = 5  # errors that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--grid", type=Path, metavar="FILE.json", help="the flags below, by name")
    add_trust(parser)
    add_grid_arguments(parser)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--workers", type=int, metavar="N", help="processes; default: one a core")
    place.add_argument("--in-process", action="store_true", help="no other process")
    place.add_argument("--scheduler", metavar="ADDRESS", help="Dask's, such as tcp://host:8786")
    add("--patience", type=float, default=30.0, help="seconds to wait for a lost scheduler")
    add("--out", type=Path, default=Path("build/sweep"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Run what is missing and write the table; return 1 if a task failed."""
    torch.set_num_threads(1)
    args = args if args.grid is None else from_file(args.grid, args)
    where, tasks = _where(args), planned(args)
    made = provenance(command_line("sweep", add_arguments, args, ELSEWHERE))
    with Store(args.out, tasks, grid_of(args) | release(), made) as store:
        begun, before = time.monotonic(), len(store.results)
        try:
            _fill(store, where, args.patience)
        except (OSError, RuntimeError, KeyboardInterrupt) as error:
            kept = f"{len(store.results)} of {len(tasks)} tasks are kept in {args.out}"
            kept = f"{kept}: the same command goes on from there"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(kept) from None
            raise RuntimeError(f"{error}; {kept}") from error
        written = ", ".join(map(str, store.merge()))
        done, seconds = len(store.results) - before, time.monotonic() - begun
        print(f"{written}: {done} tasks in {seconds:.1f} s, {before} were there already")
        failed = store.unfinished
        for task in failed[:SHOWN]:
            print(f"failed: {task.name}: {store.errors[task.key]}", file=sys.stderr)
    return 1 if failed else 0


def _fill(store: Store, where: str, patience: float) -> None:
    """Run what the store lacks, showing progress."""
    left = store.unfinished
    settled = {task.key for task in store.tasks} - {task.key for task in left}
    with Progress("sweeping", len(store.tasks), len(settled)) as progress:

        def keep(lines: Sequence[str]) -> None:
            store.add(lines)
            settled.update(json.loads(line)["task"] for line in lines)
            failed = len(settled) - len(store.results)
            progress.update(len(settled), f"{failed} failed" if failed else "")

        def idle(slots: int) -> None:
            progress.update(len(settled), "" if slots else "waiting for workers")

        drive(left, where, keep, patience=patience, idle=idle)


def _where(args: argparse.Namespace) -> str:
    if args.in_process:
        return IN_PROCESS
    if args.scheduler is not None:
        if "://" not in args.scheduler:
            raise ValueError(f"--scheduler: must be as tcp://host:8786; got {args.scheduler!r}")
        return args.scheduler
    count = (os.cpu_count() or 1) if args.workers is None else args.workers
    if count < 1:
        raise ValueError(f"--workers: must be at least 1; got {count}")
    return f"{PROCESSES}:{count}"
