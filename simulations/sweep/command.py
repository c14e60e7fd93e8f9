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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base.files import parsed_json
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import add_trust
from cactus_theory.policies._registry import policy_of_data

from ..common.grid import checked_policy, followers
from ..common.inputs import PAIR, PROMPTS, ROOT, at_least, command_line
from ..common.results import provenance
from .drive import Pools, cluster, drive, in_process, processes
from .kinds import KINDS, release
from .tasks import Store, Task

TRACE = ROOT / "simulations" / "data" / "trace"
POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "soft_band:price=1")
AT_LEAST = {"num_draft_tokens": 1, "num_prompts": 1, "max_new_tokens": 1, "seeds": 0}
# flags that say where and how, not what
ELSEWHERE = ("out", "workers", "in_process", "scheduler", "patience", "grid", "trust_code")
SHOWN = 5  # errors that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--grid", type=Path, metavar="FILE.json", help="the flags below, by name")
    add_trust(parser)
    add_grid_arguments(parser)
    executor = parser.add_mutually_exclusive_group()
    executor.add_argument("--workers", type=int, metavar="N", help="processes; default: one a core")
    executor.add_argument("--in-process", action="store_true", help="no other process")
    executor.add_argument("--scheduler", metavar="ADDRESS", help="Dask's, such as tcp://host:8786")
    add("--patience", type=float, default=30.0, help="seconds to wait for a lost scheduler")
    add("--out", type=Path, default=Path("build/sweep"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Run what is missing and write the table; return 1 if a task failed."""
    torch.set_num_threads(1)
    args = args if args.grid is None else from_file(args.grid, args)
    pools, tasks = _pools(args), planned(args)
    origin = provenance(command_line("sweep", add_arguments, args, ELSEWHERE))
    with Store(args.out, tasks, grid_of(args) | release(), origin) as store:
        start, initial = time.monotonic(), len(store.results)
        try:
            _fill(store, pools)
        except (OSError, RuntimeError, KeyboardInterrupt) as error:
            advice = f"{len(store.results)} of {len(tasks)} tasks are kept in {args.out}"
            advice = f"{advice}: the same command goes on from there"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(advice) from None
            raise RuntimeError(f"{error}; {advice}") from error
        paths = ", ".join(map(str, store.merge()))
        finished, seconds = len(store.results) - initial, time.monotonic() - start
        print(f"{paths}: {finished} tasks in {seconds:.1f} s, {initial} were there already")
        failed = store.unfinished
        for task in failed[:SHOWN]:
            print(f"failed: {task.name}: {store.errors[task.key]}", file=sys.stderr)
    return 1 if failed else 0


def _fill(store: Store, pools: Pools) -> None:
    """Run what the store lacks, showing progress."""
    unfinished = store.unfinished
    settled = {task.key for task in store.tasks} - {task.key for task in unfinished}
    with Progress("sweeping", len(store.tasks), len(settled)) as progress:

        def keep(lines: Sequence[str]) -> None:
            store.add(lines)
            settled.update(json.loads(line)["task"] for line in lines)
            failed = len(settled) - len(store.results)
            progress.update(len(settled), f"{failed} failed" if failed else "")

        def idle(slots: int) -> None:
            progress.update(len(settled), "" if slots else "waiting for workers")

        drive(unfinished, pools, keep, idle=idle)


def _pools(args: argparse.Namespace) -> Pools:
    if args.in_process:
        return in_process
    if args.scheduler is not None:
        if "://" not in args.scheduler:
            raise ValueError(f"--scheduler: must be as tcp://host:8786; got {args.scheduler!r}")
        return partial(cluster, args.scheduler, args.patience)
    count = (os.cpu_count() or 1) if args.workers is None else args.workers
    if count < 1:
        raise ValueError(f"--workers: must be at least 1; got {count}")
    return partial(processes, count)


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say what is computed."""
    add = parser.add_argument
    add("--kind", choices=tuple(KINDS), default="replay")
    add("--policies", nargs="+", default=list(POLICIES), metavar="SPEC", help="or FILE.py:NAME")
    add("--knobs", nargs="+", default=[], metavar="VALUE", help="of policies such as band:price")
    add("--verifiers", nargs="+", default=["chain", "block"], metavar="NAME")
    add("--num-draft-tokens", type=int, nargs="+", default=[4], metavar="K")
    add("--seeds", type=int, nargs="+", default=[0], help="markov: of the pair; decode")
    add("--trace", type=Path, nargs="+", default=[TRACE], metavar="DIR", help="replay")
    add("--vocab", type=int, default=3, metavar="V", help="markov")
    add("--length", type=int, default=6, metavar="T", help="markov: tokens of a text")
    add("--distance", type=float, nargs="+", default=[1.0], metavar="D",
        help="markov: the draft's from the target")  # fmt: skip
    add("--target", type=Path, nargs="+", default=[PAIR / "target"], metavar="DIR", help="decode")
    add("--draft", type=Path, nargs="+", default=[PAIR / "draft"], metavar="DIR",
        help="decode: one per target")  # fmt: skip
    add("--prompts", type=Path, default=PROMPTS, metavar="FILE", help="decode: JSON lines")
    add("--num-prompts", type=int, default=4, metavar="N", help="decode")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="decode")


def from_file(path: Path, args: argparse.Namespace) -> argparse.Namespace:
    """Return ``args`` with the grid that a file names; ValueError for what is no flag of one."""
    if conflicts := [name for name in vars(_usual()) if _differs(name, args)]:
        raise ValueError(f"--grid: must be given without {_flag(conflicts[0])}, which it sets")
    try:
        grid = parsed_json("no JSON", path.read_bytes())
        flags = _usual([word for item in grid.items() for word in _words(*item)])
    except (ValueError, AttributeError, argparse.ArgumentError) as error:
        raise ValueError(f"--grid: {path} must hold flags of a grid by name; {error}") from None
    return argparse.Namespace(**vars(args) | vars(flags))


def planned(args: argparse.Namespace) -> list[Task]:
    """Return the grid's tasks in order, each once.

    Raises OSError, ValueError or TypeError for a flag that is another kind's, and for whatever
    would make tasks fail and shows here.
    """
    _check(args)
    specs = [spec for policy in args.policies for spec in _each_knob(policy, args.knobs)]
    cells = [
        (spec, verifier)
        for spec in dict.fromkeys(map(_reader(args), specs))
        for verifier in followers(spec, args.verifiers)
    ]
    return list({task.key: task for task in KINDS[args.kind].tasks(args, cells)}.values())


def _reader(args: argparse.Namespace) -> Callable[[str], str]:
    """Return what reads a policy's spec; of a grid file, which is data, without running code."""
    file = getattr(args, "grid", None)
    if file is None or args.trust_code:
        return checked_policy
    return lambda spec: policy_of_data(spec, file).spec


def grid_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that say what is computed, of paths the names."""
    return {name: _plain(getattr(args, name)) for name in vars(_usual())}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _usual(words: Sequence[str] = ()) -> argparse.Namespace:
    """Return the flags of a grid as usual, but for those that words name."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_grid_arguments(parser)
    return parser.parse_args(words)


def _differs(name: str, args: argparse.Namespace) -> bool:
    return getattr(args, name) != getattr(_usual(), name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(name: str, value: Any) -> Iterator[str]:
    yield _flag(name)
    yield from map(str, value if isinstance(value, list) else [value])


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Path) else value


def _check(args: argparse.Namespace) -> None:
    for name, kind in KINDS.items():
        for flag in kind.flags:
            if flag not in KINDS[args.kind].flags and _differs(flag, args):
                raise ValueError(f"{_flag(flag)}: is a flag of --kind {name}; got {args.kind}")
    at_least(args, **AT_LEAST)


def _each_knob(spec: str, values: Sequence[str]) -> list[str]:
    """Return the spec once per value if its first knob has none, as in ``band:price``."""
    head, colon, knobs = spec.rpartition(":")
    first, *others = knobs.split(",")
    if not colon or "=" in first or head.endswith(".py"):
        return [spec]
    if not values:
        raise ValueError(f"--knobs: must hold values for {spec}; got none")
    return [f"{head}:{','.join([f'{first}={value}', *others])}" for value in values]
