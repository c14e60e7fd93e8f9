"""Tasks of a sweep: plain data that says all that decides their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..common.grid import files_of, label
from ..common.inputs import digest

# name of a trace's manifest, which holds its shards' digests
MANIFEST = "manifest.json"
Row = dict[str, Any]
# path of a file, the same on every machine, and the digest of its content
File = tuple[str, str]


@dataclass(frozen=True)
class Task:
    kind: str
    policy: str  # its spec, as a worker reads it
    # first columns of its rows, which the grid sets; the policy's files by name
    case: Mapping[str, Any]
    files: Mapping[str, File] = field(default_factory=dict)  # by name; their digests decide

    @cached_property
    def key(self) -> str:
        """Return the name under which its rows are kept, the same on every machine."""
        digests = {name: content for name, (_, content) in self.files.items()}
        identity = [self.kind, self.case, digests]
        return digest(json.dumps(identity, sort_keys=True).encode())

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def check_files(self) -> None:
        """Raise OSError or ValueError for a file that is not the one of the plan here."""
        for name, (place, planned) in self.files.items():
            path = Path(place)
            if not path.exists():
                raise OSError(f"{name}: {path} must be on every machine that works; it is not here")
            if (now := _digest(path)) != planned:
                raise ValueError(
                    f"{name}: {path} must be what the sweep was planned with, {planned}; "
                    f"it is {now} here"
                )


def faults_of(
    tasks: Sequence[Task], results: Mapping[str, Any]
) -> Callable[[str, Mapping[str, Any]], str | None]:
    """Return a function that names a column at fault in a kept result of these tasks.

    Rows have the columns of their task, with its values, and those of all others.
    """
    cases = {task.key: task.case for task in tasks}
    kept = [row for key in cases for row in _rows(results.get(key, {})) or ()]
    columns = {name for row in kept for name in row}

    def fault(key: str, result: Mapping[str, Any]) -> str | None:
        if key not in cases:
            return None
        if not (rows := _rows(result)):
            return f"rows: must be the rows of a task; got {result.get('rows')!r:.60}"
        for row, name in product(rows, sorted({*cases[key], *columns})):
            value, asked = row.get(name), cases[key].get(name)
            if name not in row or not isinstance(value, str | int | float | None):
                return f"{name}: must be a number or a word in every row; got {value!r:.60}"
            if name in cases[key] and value != asked:
                return f"{name}: must be {asked!r}; got {value!r:.60}"
        return None

    return fault


def _rows(result: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows of a kept result, None for something else."""
    rows = result.get("rows")
    whole = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return rows if whole else None


def task_of(
    kind: str, policy: str, case: Mapping[str, Any], files: Mapping[str, File] | None = None
) -> Task:
    """Return a task for a checked policy, whose own files are added to ``files``."""
    policy_files = {f"policy_file_{number}": file for number, file in enumerate(files_of(policy))}
    spec = policy
    for file in policy_files.values():
        spec = spec.replace(str(file), str(file.resolve()))
    named = {"policy": ":".join(filter(None, label(policy)))}
    digests = file_digests(policy_files) | dict(files or {})
    return Task(kind, spec, named | dict(case), digests)


def file_digests(files: Mapping[str, Path]) -> dict[str, File]:
    """Return files, or folders of traces, as tasks name them."""
    return {name: (str(path.resolve()), _digest(path)) for name, path in files.items()}


def _digest(path: Path) -> str:
    return digest((path / MANIFEST if path.is_dir() else path).read_bytes())
