"""Run a grid of policies, verifiers and knobs in this process or on many; resume after any kill.

Kinds of tasks: replay (a trace, exact), markov (whole texts of tiny models, exact). A policy whose
knob has no value, such as band:price, takes each of --knobs. Decodes of a pair of models are those
of ``throughput``.

The rows of finished tasks are kept in journal.jsonl under --out, whatever the grid: the same
command goes on from there, and a larger one computes what is new. sweep.csv has the grid's order
and the same bytes wherever its tasks ran, on processors of one kind. Tasks that fail are named,
and tried again by the same command.

Other machines: in a checkout of the same commit on each start "PYTHONPATH=. dask scheduler" (on
one of them) and "PYTHONPATH=. dask worker ADDRESS --nworkers N --nthreads 1"; pip install
'dask[distributed]'. Traces and files of policies must lie at the same path everywhere. Workers
compare them with those that the sweep was planned with, and their code and versions with the
command's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cactus_theory.base.terminal import Progress

from ..common.grid import checked_policy, followers
from ..common.inputs import ROOT, at_least
from ..common.journal import Journal
from ..common.results import publish
from .executors import cluster, on_cluster, serial
from .kinds import KINDS, release
from .tasks import Task, faults_of

TRACE = ROOT / "simulations" / "data" / "trace"
POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "band:price=1,per_row=True")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kind", choices=tuple(KINDS), default="replay")
    add("--policies", nargs="+", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--knobs", nargs="+", default=[], metavar="VALUE", help="of policies such as band:price")
    add("--verifiers", nargs="+", default=["chain", "block"], metavar="NAME")
    add("--num-draft-tokens", type=int, nargs="+", default=[4], metavar="K")
    add("--seeds", type=int, nargs="+", default=[0], help="markov: of the pair")
    add("--trace", type=Path, nargs="+", default=[TRACE], metavar="DIR", help="replay")
    add("--vocab", type=int, default=3, metavar="V", help="markov")
    add("--length", type=int, default=6, metavar="T", help="markov: tokens of a text")
    add("--distance", type=float, nargs="+", default=[1.0], metavar="D",
        help="markov: the draft's from the target")  # fmt: skip
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--workers", type=int, metavar="N", help="processes; default: this one")
    place.add_argument("--scheduler", metavar="ADDRESS", help="Dask's, such as tcp://host:8786")
    add("--out", type=Path, default=Path("build/sweep"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    if args.workers is not None:
        at_least(args, workers=1)
    tasks, planned = tasks_of(args), release()
    start = time.monotonic()
    with Journal(args.out / "journal.jsonl", planned) as journal, ExitStack() as stack:
        journal.check(faults_of(tasks, journal.results))
        missing = [task for task in tasks if task.key not in journal.results]
        outcomes = serial(missing, planned)
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
        kept = [journal.results[task.key] for task in tasks if task.key in journal.results]
    left_out = f"{len(errors)} of {len(tasks)} tasks, which are left out"
    rows = [row for outcome in kept for row in outcome["rows"]]
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
    """Return the grid's tasks in order, each once.

    Raises OSError, ValueError or TypeError for a flag that is another kind's, and for whatever
    would make tasks fail and shows here.
    """
    usual = argparse.ArgumentParser()
    add_arguments(usual)
    for name, kind in KINDS.items():
        for flag in set(kind.flags) - set(KINDS[args.kind].flags):
            if getattr(args, flag) != usual.get_default(flag):
                words = f"--{flag.replace('_', '-')}"
                raise ValueError(f"{words}: is a flag of --kind {name}; got {args.kind}")
    at_least(args, num_draft_tokens=1, seeds=0)
    specs = [spec for policy in args.policies for spec in _each_knob(policy, args.knobs)]
    cells = [
        (spec, verifier)
        for spec in dict.fromkeys(map(checked_policy, specs))
        for verifier in followers(spec, args.verifiers)
    ]
    return list({task.key: task for task in KINDS[args.kind].tasks(args, cells)}.values())


def _each_knob(spec: str, values: Sequence[str]) -> list[str]:
    """Return the spec once per value if its first knob has none, as in ``band:price``."""
    head, colon, knobs = spec.rpartition(":")
    first, *others = knobs.split(",")
    if not colon or "=" in first or head.endswith(".py"):
        return [spec]
    if not values:
        raise ValueError(f"--knobs: must hold values for {spec}; got none")
    return [f"{head}:{','.join([f'{first}={value}', *others])}" for value in values]
