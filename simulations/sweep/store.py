"""The folder of a sweep: a manifest, a shard per batch, and the table once all is there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cactus_theory.base.files import FolderLock, write_whole

from ..common.inputs import digest
from ..common.journal import check_same_run
from ..common.results import filled, write_csv, write_json
from .task import Row, Task

MANIFEST, SHARDS, TABLE, ERRORS = "manifest.json", "shards", "sweep.csv", "errors.csv"


class Store:
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
        written = []
        for name, table in ((TABLE, filled(rows)), (ERRORS, error_rows)):
            path = self.folder / name
            path.unlink(missing_ok=True)
            if table:
                write_csv(path, table, notes)
                written.append(path)
        return written

    def close(self) -> None:
        """Let others write to the folder."""
        self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            stored, before = dict(manifest["sweep"]), dict(manifest["made"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--out: {path} must be the manifest of a sweep; it is not") from None
        check_same_run(path, stored, sweep)
        return before

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
