"""Tasks of a sweep: plain data that says all that decides their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..common.grid import files_of, label
from ..common.inputs import digest, folder_digest

# of a trace, which holds its shards' digests
MANIFEST = "manifest.json"
Row = dict[str, Any]
# where a file lies on every machine, and the digest of its content
File = tuple[str, str]


@dataclass(frozen=True)
class Task:
    kind: str
    policy: str  # its spec, as a worker reads it
    # the columns that the grid sets, which its rows begin with; the policy's files by name
    case: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)  # what else decides its rows
    files: Mapping[str, File] = field(default_factory=dict)  # by name; their digests decide

    @cached_property
    def key(self) -> str:
        """Return the name under which its rows are kept, the same on every machine."""
        digests = {name: content for name, (_, content) in self.files.items()}
        identity = [self.kind, self.case, self.settings, digests]
        return digest(json.dumps(identity, sort_keys=True).encode())

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def path(self, name: str) -> Path:
        """Return where a file lies; OSError or ValueError if it is not the one of the plan."""
        path, planned = self.files[name]
        return _checked(name, Path(path), planned)


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
        spec = spec.replace(str(file), str(file.resolve()))
    named = {"policy": ":".join(filter(None, label(policy)))}
    digests = file_digests(policy_files) | dict(files or {})
    return Task(kind, spec, named | dict(case), dict(settings or {}), digests)


def file_digests(files: Mapping[str, Path]) -> dict[str, File]:
    """Return files, or folders of them, as tasks name them."""
    return {name: (str(path.resolve()), _digest(path)) for name, path in files.items()}


def _digest(path: Path) -> str:
    if (path / MANIFEST).is_file():
        return digest((path / MANIFEST).read_bytes())
    return folder_digest(path) if path.is_dir() else digest(path.read_bytes())


@lru_cache(maxsize=64)  # once per worker: weights are long
def _checked(name: str, path: Path, planned: str) -> Path:
    if not path.exists():
        raise OSError(f"{name}: {path} must be on every machine that works; it is not here")
    if (now := _digest(path)) != planned:
        raise ValueError(
            f"{name}: {path} must be what the sweep was planned with, {planned}; it is {now} here"
        )
    return path
