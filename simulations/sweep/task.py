"""A task of a sweep, plain data that says all that decides its rows, and how it is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..common.grid import files_of, label
from ..common.inputs import ROOT, digest, folder_digest

# what stands for the folder of the checkout in a path or a spec: each worker has its own
CHECKOUT = "{checkout}"
MANIFEST = "manifest.json"
Row = dict[str, Any]
File = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """One cell of a grid."""

    kind: str
    policy: str  # its spec, as a worker reads it
    # the columns that the grid sets, which its rows begin with; the policy's files by name
    case: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)  # what else decides its rows
    # name → (path, digest) of what a worker reads; the digest decides, the path does not
    files: Mapping[str, File] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Return the name under which its result is kept, the same on every machine."""
        digests = {name: content for name, (_, content) in self.files.items()}
        plain = [self.kind, self.case, self.settings, digests]
        return digest(json.dumps(plain, sort_keys=True).encode())

    @property
    def name(self) -> str:
        """Return it in words."""
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def path(self, name: str) -> Path:
        """Return where this machine has a file.

        Raises OSError where it is not there, ValueError where it is another than was planned with.
        """
        place, expected = self.files[name]
        path = Path(local(place))
        return (_checked_folder if path.is_dir() else _checked)(name, path, expected)


def task_of(
    kind: str,
    policy: str,
    case: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, File] | None = None,
) -> Task:
    """Return a task for a checked policy, whose own files are added to ``files``."""
    policy_files = {f"policy_file_{number}": file for number, file in enumerate(files_of(policy))}
    spec = policy
    for file in policy_files.values():
        spec = spec.replace(str(file), portable(file))
    named = {"policy": ":".join(filter(None, label(policy)))}
    digests = file_digests(policy_files) | dict(files or {})
    return Task(kind, spec, named | dict(case), dict(settings or {}), digests)


def file_digests(files: Mapping[str, Path]) -> dict[str, File]:
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


def _checked(name: str, path: Path, planned: str) -> Path:
    if not path.exists():
        raise OSError(f"{name}: {path} must be on every machine that works; it is not here")
    if (now := content_digest(path)) != planned:
        raise ValueError(
            f"{name}: {path} must be what the sweep was planned with, {planned}; it is {now} here"
        )
    return path


# once per worker: weights are long
_checked_folder = lru_cache(maxsize=64)(_checked)


def record(key: str, **content: Any) -> str:
    """Return a line of a shard; floats keep all their digits."""
    return json.dumps({"task": key} | content, separators=(",", ":"), ensure_ascii=False)


def failure(task: Task, error: str) -> str:
    """Return the line of a task that failed, which says how in one line."""
    return record(task.key, error=" ".join(error.split()))
