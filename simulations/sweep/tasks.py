"""Tasks of a sweep, plain data that says all that decides their rows; the folder of the results.

The folder has a manifest, a shard per batch, and the table once all is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from cactus_theory.base.files import FolderLock, Resource, write_whole

from ..common.grid import files_of, label
from ..common.inputs import ROOT, digest, folder_digest
from ..common.journal import check_same_run
from ..common.results import filled, write_csv, write_json

# what stands for the folder of the checkout in a path or a spec: each worker has its own
CHECKOUT = "{checkout}"
MANIFEST, SHARDS, TABLE, ERRORS = "manifest.json", "shards", "sweep.csv", "errors.csv"
Row = dict[str, Any]
File = tuple[str, str]


@dataclass(frozen=True)
class Task:
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
        identity = [self.kind, self.case, self.settings, digests]
        return digest(json.dumps(identity, sort_keys=True).encode())

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.case.items())

    def path(self, name: str) -> Path:
        """Return where this machine has a file, the one that the sweep was planned with."""
        text, expected = self.files[name]
        path = Path(local(text))
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
    absolute = path.resolve()
    if absolute.is_relative_to(ROOT):
        return f"{CHECKOUT}/{absolute.relative_to(ROOT).as_posix()}"
    return str(absolute)


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


class Store(Resource):
    """Results by task; use as a context manager.

    A shard is there whole or not at all, named by its content, so that neither a kill nor the
    order in which batches arrive leaves a trace. A task that failed is tried again when the
    folder is next opened. ``provenance`` is that of when it was begun. Raises ValueError where the
    folder belongs to another sweep, another command is writing to it, or a shard is broken.
    """

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[Task],
        identity: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        self.folder, self.tasks = folder, tasks
        self.results: dict[str, list[Row]] = {}  # by the tasks' keys
        self.errors: dict[str, str] = {}
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(folder)
        try:
            self.provenance = self._begin(identity, provenance)
            self._read()
        except BaseException:
            self.close()
            raise

    @property
    def unfinished(self) -> list[Task]:
        """Return the tasks without rows, in the grid's order."""
        return [task for task in self.tasks if task.key not in self.results]

    def add(self, lines: Sequence[str]) -> None:
        """Keep the lines of finished tasks; they are on the disk when this returns."""
        content = "".join(f"{line}\n" for line in lines).encode()
        write_whole(self.folder / SHARDS / f"{digest(content)}.jsonl", content)
        for line in lines:
            self._take(json.loads(line))

    def merge(self) -> list[Path]:
        """Write the table in the grid's order, and that of errors if there are any."""
        failed = [task for task in self.unfinished if task.key in self.errors]
        notes = dict(self.provenance)
        if failed:
            notes["failed"] = f"{len(failed)} of {len(self.tasks)} tasks, which are left out"
        rows = [row for task in self.tasks for row in self.results.get(task.key, [])]
        error_rows = [{"task": task.name, "error": self.errors[task.key]} for task in failed]
        paths = []
        for name, table in ((TABLE, filled(rows)), (ERRORS, error_rows)):
            path = self.folder / name
            path.unlink(missing_ok=True)
            if table:
                write_csv(path, table, notes)
                paths.append(path)
        return paths

    def close(self) -> None:
        self._lock.close()

    def _begin(self, identity: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Compare with the manifest, or write it; return the provenance it holds."""
        keys = digest("".join(task.key for task in self.tasks).encode())
        sweep = json.loads(json.dumps(dict(identity) | {"tasks": len(self.tasks), "keys": keys}))
        path = self.folder / MANIFEST
        if not path.exists():
            write_json(path, {"sweep": sweep, "made": dict(provenance)})
            return dict(provenance)
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            stored, origin = dict(manifest["sweep"]), dict(manifest["made"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--out: {path} must be the manifest of a sweep; it is not") from None
        check_same_run(path, stored, sweep)
        return origin

    def _read(self) -> None:
        """Take every whole shard; what a kill left of one that was being written goes."""
        for leftover in (self.folder / SHARDS).glob(".*.jsonl.*"):
            leftover.unlink()
        for path in sorted((self.folder / SHARDS).glob("*.jsonl")):
            content = path.read_bytes()
            if digest(content) != path.stem:
                raise ValueError(f"--out: {path} has changed since it was written; delete it")
            for line in content.decode().splitlines():
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        key = record["task"]
        if "error" in record:
            self.errors[key] = record["error"]
        elif repr(self.results.setdefault(key, record["rows"])) != repr(record["rows"]):
            raise RuntimeError(
                f"a task has two results, {self.results[key]!r} and {record['rows']!r}: it must "
                "depend on its description alone"
            )
