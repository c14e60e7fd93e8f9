"""Kinds of tasks: which tasks a grid has, which rows a task; and how a worker runs one."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cactus_theory.traces import Trace, replay

from ..common.inputs import code_digest
from ..common.results import package_version
from ..markov import Setting, markov_pair, measured
from ..replay import replay_figures
from .tasks import MANIFEST, Row, Task, file_digests, task_of

Cells = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """A kind of sweep: the flags that only it reads, its tasks, the rows of a task.

    ``tasks`` are those of cells (policy, verifier), and raise for flags that would make them
    fail. ``measure`` returns the same whenever and wherever it is called; all rows of a kind share
    their columns, the first of which are the task's own.
    """

    flags: tuple[str, ...]
    tasks: Callable[[argparse.Namespace, Cells], Iterator[Task]]
    measure: Callable[[Task], list[Row]]


def _replays(args: argparse.Namespace, cells: Cells) -> Iterator[Task]:
    for folder in args.trace:
        trace = Trace.open(folder)
        for width in args.num_draft_tokens:
            if width > trace.num_draft_tokens:
                raise ValueError(
                    f"--num-draft-tokens: must be at most the {trace.num_draft_tokens} that "
                    f"{trace.name} logged; got {width}"
                )
        files = file_digests({"trace": trace.folder})
        for policy, verifier in cells:
            for width in args.num_draft_tokens:
                case = {"trace": trace.name, "verifier": verifier, "num_draft_tokens": width}
                yield task_of("replay", policy, case, files=files)


def _replayed(task: Task) -> list[Row]:
    """Return tokens and emitted KL per call and per token, with errors over texts."""
    trace = _trace(*task.files["trace"])
    width = task.case["num_draft_tokens"]
    result = replay(trace, task.policy, task.case["verifier"], num_draft_tokens=width)
    return [dict(task.case) | replay_figures(result, "kl")]


@lru_cache(maxsize=4)
def _trace(folder: str, digest: str) -> Trace:
    """Return a trace, each of whose files is then checked once by each worker."""
    return Trace.open(f"{folder}/{MANIFEST}")


def _enumerations(args: argparse.Namespace, cells: Cells) -> Iterator[Task]:
    for distance in args.distance:
        for seed in args.seeds:
            pair = markov_pair(args.vocab, seed=seed, distance=distance)
            for policy, verifier in cells:
                for width in args.num_draft_tokens:
                    Setting(policy, width, args.length, verifier).check(pair)
                    case = {"verifier": verifier, "num_draft_tokens": width, "vocab": args.vocab,
                            "length": args.length, "distance": distance, "seed": seed}  # fmt: skip
                    yield task_of("markov", policy, case)


def _enumerated(task: Task) -> list[Row]:
    """Return the KL of the text, the meter that bounds it, and tokens per call."""
    case = dict(task.case)
    pair = markov_pair(case["vocab"], seed=case["seed"], distance=case["distance"])
    setting = Setting(task.policy, case["num_draft_tokens"], case["length"], case["verifier"])
    return [case | measured(pair, setting)]


KINDS = {
    # a policy and a verifier on a trace of logged rows: exact, nothing is sampled
    "replay": Kind(("trace",), _replays, _replayed),
    # whole texts of a tiny random Markov pair, enumerated: exact
    "markov": Kind(("seeds", "vocab", "length", "distance"), _enumerations, _enumerated),
}

# files of the code that decides a task's rows
CODE = (
    *("cactus_theory/**/*.py", "simulations/replay.py"),
    *(f"simulations/{name}/*.py" for name in ("common", "markov", "sweep")),
)
# lock of one worker's threads, which share traces and their buffers
_turn = threading.Lock()
# ``rows`` of a task, or its ``error`` in one line
Outcome = dict[str, Any]


def perform(task: Task, planned: Mapping[str, str | None]) -> Outcome:
    """Return ``rows`` of a task, or its ``error``; on one thread of torch.

    It fails where code or versions are not those that the sweep was planned with.
    """
    try:
        with _turn:
            torch.set_num_threads(1)  # of this thread: OpenMP counts them by thread
            _check_release(planned)
            task.check_files()
            return {"rows": KINDS[task.kind].measure(task)}
    except Exception as error:  # whatever it is: the other tasks go on
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def _check_release(planned: Mapping[str, str | None]) -> None:
    for name, here in release().items():
        if planned[name] != here:
            raise RuntimeError(
                f"every worker must have the same {name} as the command; the command has "
                f"{planned[name]}, a worker {here} (restart workers after a change)"
            )


@lru_cache(maxsize=1)
def release() -> dict[str, str | None]:
    """Return versions and a digest of the code, as they were when first asked for."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": package_version("transformers"),
        "code": code_digest(*CODE),
    }
