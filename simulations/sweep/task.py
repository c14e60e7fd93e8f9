"""A task of a sweep, plain data that says all that decides its rows, and how it is run."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common.grid import files_of, label
from ..common.inputs import ROOT, digest, folder_digest
from .kinds import kind

# what stands for the folder of the checkout in a path or a spec: each worker has its own
CHECKOUT = "{checkout}"
MANIFEST = "manifest.json"
# the code that decides what a task's rows are
CODE = (
    "cactus_theory",
    *(f"simulations/{name}" for name in ("common", "markov", "sweep", "traces")),
)
# threads of one worker share models and their buffers
_turn = threading.Lock()
Row = dict[str, Any]
File = tuple[str, str]
# key of a task, its line of a shard, seconds it took
Done = tuple[str, str, float]


@dataclass(frozen=True)
class Task:
    """One cell of a grid.

    Attributes
    ----------
    kind : which of :data:`simulations.sweep.kinds.KINDS`.
    policy : its spec, as a worker reads it.
    case : the columns that the grid sets, which its rows begin with; the policy's files by name.
    settings : what else decides its rows.
    files : name → (path, digest) of what a worker reads; the digest decides, the path does not.
    """

    kind: str
    policy: str
    case: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Return the name under which its result is kept, the same on every machine."""
        digests = {name: own for name, (_, own) in self.files.items()}
        plain = [self.kind, self.case, self.settings, digests]
        return digest(json.dumps(plain, sort_keys=True).encode())

    @property
    def name(self) -> str:
        """Return it in words."""
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def path(self, name: str) -> Path:
        """Return where this machine has a file, which must be the one the task was made for.

        Raises
        ------
        OSError, ValueError
            It is not there, or its content is another.
        """
        place, wanted = self.files[name]
        path = Path(local(place))
        return (_checked_folder if path.is_dir() else _checked)(name, path, wanted)


def task(
    kind: str,
    policy: str,
    case: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, File] | None = None,
) -> Task:
    """Return a task for a checked policy, whose own files are added to ``files``."""
    own = {f"policy_file_{number}": file for number, file in enumerate(files_of(policy))}
    spec = policy
    for file in own.values():
        spec = spec.replace(str(file), portable(file))
    named = {"policy": ":".join(filter(None, label(policy)))}
    return Task(
        kind, spec, named | dict(case), dict(settings or {}), known(own) | dict(files or {})
    )


def known(files: Mapping[str, Path]) -> dict[str, File]:
    """Return files as tasks name them."""
    return {name: (portable(path), content_digest(path)) for name, path in files.items()}


def portable(path: Path) -> str:
    """Return a path for other machines: within the checkout from there, else absolute."""
    place = path.resolve()
    if place.is_relative_to(ROOT):
        return f"{CHECKOUT}/{place.relative_to(ROOT).as_posix()}"
    return str(place)


def local(text: str) -> str:
    """Return a path or a spec of :func:`portable` paths as this machine reads it."""
    return text.replace(CHECKOUT, str(ROOT))


def content_digest(path: Path) -> str:
    """Return a digest of a file, of a trace (its manifest holds its shards'), of a folder."""
    if (path / MANIFEST).is_file():
        return digest((path / MANIFEST).read_bytes())
    return folder_digest(path) if path.is_dir() else digest(path.read_bytes())


def _checked(name: str, path: Path, wanted: str) -> Path:
    if not path.exists():
        raise OSError(f"{name}: {path} must be on every machine that works; it is not here")
    if (found := content_digest(path)) != wanted:
        raise ValueError(
            f"{name}: {path} must be what the sweep was planned with, {wanted}; it is {found} here"
        )
    return path


# once per worker: weights are long
_checked_folder = lru_cache(maxsize=64)(_checked)


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
