"""What a worker does: the tasks of a batch one after the other, on one thread."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..common.inputs import ROOT, digest
from .kinds import kind
from .task import Task

# the code that decides what a task's rows are
CODE = (
    "cactus_theory",
    *(f"simulations/{name}" for name in ("common", "markov", "sweep", "traces")),
)
# threads of one worker share models and their buffers
_turn = threading.Lock()
# key of a task, its line of a shard, seconds it took
Done = tuple[str, str, float]


def perform(tasks: Sequence[Task], planned: dict[str, str | None]) -> list[Done]:
    """Return what became of each task: a line of JSON with its rows, or with its error.

    Raises
    ------
    RuntimeError
        Code or versions differ from those of the machine that planned the sweep.
    """
    own = release()
    for name in planned | own:
        if planned.get(name) != own.get(name):
            raise RuntimeError(
                f"every worker must have the same {name} as the command; the command has "
                f"{planned.get(name)}, a worker {own.get(name)} (restart workers after a change)"
            )
    with _turn:
        torch.set_num_threads(1)  # of this thread: OpenMP counts them by thread
        return [_one(task) for task in tasks]


def _one(task: Task) -> Done:
    begun = time.perf_counter()
    try:
        for name in task.files:
            task.path(name)
        line = record(task.key, rows=kind(task.kind).measure(task))
    except Exception as error:  # whatever it is: the other tasks go on
        line = failure(task, f"{type(error).__name__}: {error}")
    return task.key, line, time.perf_counter() - begun


def record(key: str, **what: Any) -> str:
    """Return a line of a shard; floats keep all their digits."""
    return json.dumps({"task": key} | what, separators=(",", ":"), ensure_ascii=False)


def failure(task: Task, error: str) -> str:
    """Return the line of a task that failed, which says how in one line."""
    return record(task.key, error=" ".join(error.split()))


@lru_cache(maxsize=1)
def release() -> dict[str, str | None]:
    """Return versions and a digest of the code, as they were when first asked for."""
    files = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    content = b"".join(
        path.relative_to(ROOT).as_posix().encode() + path.read_bytes() for path in files
    )
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": _version("transformers"),
        "code": digest(content),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
