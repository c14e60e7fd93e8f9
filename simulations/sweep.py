"""Enumerate texts of tiny models over a grid of policies, verifiers, K and pairs; resume.

Rows of finished tasks
are kept in journal.jsonl under --out, whatever the grid: the same command goes on from there, and a
larger one computes what is new. sweep.csv has the grid's order and the same bytes wherever its
tasks ran, on processors of one kind. Tasks that fail are named, and tried again by the same
command.

Other machines: in a checkout of the same commit at the same path on each start "PYTHONPATH=. dask
scheduler" (on one of them) and "PYTHONPATH=. dask worker ADDRESS --nworkers N --nthreads 1"; pip
install 'dask[distributed]'. Workers compare their code and versions with the command's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cactus_theory.base.terminal import Progress

from .common.grid import checked_policy, files_of, followers, label
from .common.inputs import at_least, code_digest, digest
from .common.journal import Journal
from .common.results import package_version, publish
from .markov import Setting, markov_pair, measured

POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "band:price=1,per_row=True")
# files of the code that decides a task's row
CODE = (
    "cactus_theory/**/*.py",
    "simulations/sweep.py",
    "simulations/common/*.py",
    "simulations/markov/*.py",
)
# seconds within which a scheduler and a worker must answer
PATIENCE_S = 30
# code run by a worker as it starts: it leaves Ctrl-C to the command, which ends the worker
IGNORES_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
# lock of one worker's threads, which share buffers
_turn = threading.Lock()
# the ``row`` of a task, or its ``error`` in one line
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """All that decides a row: its first columns, the policy as a worker reads it, its files."""

    policy: str
    case: Mapping[str, Any]
    files: Sequence[str] = ()  # digests of the policy's

    @property
    def key(self) -> str:
        """Return the name under which its row is kept, the same on every machine."""
        return digest(json.dumps([self.case, self.files], sort_keys=True).encode())

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.case.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", nargs="+", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--verifiers", nargs="+", default=["chain", "block"], metavar="NAME")
    add("--num-draft-tokens", type=int, nargs="+", default=[4], metavar="K")
    add("--seeds", type=int, nargs="+", default=[0], help="of the pair")
    add("--vocab", type=int, default=3, metavar="V")
    add("--length", type=int, default=6, metavar="T", help="tokens of a text")
    add("--distance", type=float, nargs="+", default=[1.0], metavar="D",
        help="the draft's from the target")  # fmt: skip
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--workers", type=int, metavar="N", help="processes; default: this one")
    place.add_argument("--scheduler", metavar="ADDRESS", help="Dask's, such as tcp://host:8786")
    add("--out", type=Path, default=Path("build/sweep"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    if args.workers is not None:
        at_least(args, workers=1)
    tasks, planned, start = tasks_of(args), release(), time.monotonic()
    with Journal(args.out / "journal.jsonl", planned) as journal, ExitStack() as stack:
        missing = [task for task in tasks if task.key not in journal.results]
        outcomes = ((task, perform(task, planned)) for task in missing)
        if missing and (args.workers or args.scheduler):
            client = stack.enter_context(cluster(args.workers, args.scheduler))
            outcomes = on_cluster(client, missing, planned)
        errors: dict[str, str] = {}
        with Progress("sweeping", len(tasks), len(tasks) - len(missing)) as progress:
            for task, outcome in outcomes:
                if "error" in outcome:
                    errors[task.name] = outcome["error"]
                else:
                    journal.add(task.key, outcome)
                progress.advance(f"{len(errors)} failed" if errors else "")
        rows = [journal.results[task.key]["row"] for task in tasks if task.key in journal.results]
    left_out = f"{len(errors)} of {len(tasks)} tasks, which are left out"
    path = args.out / "sweep.csv"
    path.unlink(missing_ok=True)
    if rows:
        publish(args, rows, path, **({"failed": left_out} if errors else {}))
        print(f"{len(rows)} rows in {path}")
    seconds, there = time.monotonic() - start, len(tasks) - len(missing)
    print(f"{len(missing) - len(errors)} tasks in {seconds:.1f} s, {there} were there already")
    for name, error in errors.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    return 1 if errors else 0


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the grid's tasks in order, each once; raise for what would make them fail."""
    at_least(args, num_draft_tokens=1, seeds=0)
    cells = [
        (spec, verifier)
        for spec in dict.fromkeys(map(checked_policy, args.policies))
        for verifier in followers(spec, args.verifiers)
    ]
    tasks, widths = [], list[int](args.num_draft_tokens)
    for distance, seed in product(args.distance, args.seeds):
        pair = markov_pair(args.vocab, seed=seed, distance=distance)
        for (spec, verifier), width in product(cells, widths):
            Setting(spec, width, args.length, verifier).check(pair)
            case = {"verifier": verifier, "num_draft_tokens": width, "vocab": args.vocab,
                    "length": args.length, "distance": distance, "seed": seed}  # fmt: skip
            tasks.append(task_of(spec, case))
    return list({task.key: task for task in tasks}.values())


def task_of(spec: str, case: Mapping[str, Any]) -> Task:
    named, files = {"policy": ":".join(filter(None, label(spec)))}, files_of(spec)
    for file in files:
        spec = spec.replace(str(file), str(file.resolve()))
    return Task(spec, named | dict(case), [digest(file.read_bytes()) for file in files])


def perform(task: Task, planned: Mapping[str, str | None]) -> Outcome:
    """Return the outcome of a task, on one thread of torch.

    It fails where code or versions are not those that the sweep was planned with.
    """
    try:
        with _turn:
            torch.set_num_threads(1)  # of this thread: OpenMP counts them by thread
            for name, here in release().items():
                if planned[name] != here:
                    raise RuntimeError(
                        f"every worker must have the same {name} as the command; the command has "
                        f"{planned[name]}, a worker {here} (restart workers after a change)"
                    )
            case = dict(task.case)
            pair = markov_pair(case["vocab"], seed=case["seed"], distance=case["distance"])
            sizes = case["num_draft_tokens"], case["length"], case["verifier"]
            return {"row": case | measured(pair, Setting(task.policy, *sizes))}
    except Exception as error:  # whatever it is: the other tasks go on
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


@lru_cache(maxsize=1)
def release() -> dict[str, str | None]:
    """Return versions and a digest of the code, as they were when first asked for."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    versions["transformers"] = package_version("transformers")
    return versions | {"code": code_digest(*CODE)}


@contextmanager
def cluster(workers: int | None, address: str | None) -> Iterator[Any]:
    """Open the client of a cluster: of so many processes of this machine, or at an address.

    Processes are fresh interpreters, of one thread, that end with this one. Raises
    ModuleNotFoundError without Dask, ValueError for an address of no known kind, OSError where no
    scheduler answers or none of its workers is there.
    """
    import distributed  # pip install 'dask[distributed]'

    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # what the library's log lines tell is told in words
        place: Any = address
        if address is None:
            # what a task takes is not known: no worker is ended for its memory
            options = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": 0}
            options |= {"dashboard_address": None, "silence_logs": logging.CRITICAL}
            options |= {"preload": IGNORES_INTERRUPTS}
            place = stack.enter_context(distributed.LocalCluster(**options))
        client = distributed.Client(place, timeout=PATIENCE_S, set_as_default=False)
        stack.enter_context(client).wait_for_workers(1, timeout=PATIENCE_S)
        yield client


def on_cluster(
    client: Any, tasks: Sequence[Task], planned: Mapping[str, str | None]
) -> Iterator[tuple[Task, Outcome]]:
    """Yield the outcomes of tasks as they finish; OSError once the scheduler is lost.

    Dask runs the task of a worker that died again, on another worker, and gives it up once
    ``allowed-failures`` more of them have died.
    """
    import distributed  # pip install 'dask[distributed]'

    # not pure: what another client computed of a task is not taken
    futures = client.map(perform, tasks, planned=planned, pure=False)
    by_key = {future.key: task for future, task in zip(futures, tasks, strict=True)}
    done = distributed.as_completed(
        futures, loop=client.loop, with_results=True, raise_errors=False
    )
    del futures  # what is finished is forgotten, here and on the workers
    for future, result in done:
        if future.status == "finished":
            yield by_key[future.key], result
        elif future.status == "error":  # a killed worker, or what it cannot even read
            yield by_key[future.key], {"error": " ".join(str(result[1]).split())}
        else:
            raise OSError("--scheduler: it is lost; the same command goes on from what is kept")
