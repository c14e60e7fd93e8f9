"""A file of finished decodes that survives being killed: one JSON line each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# longer settings, such as the contents of files, are not shown where they differ
SHOWN = 200


class Journal:
    """Results by job key; the first line holds the settings of the run.

    A line is on disk before the next decode starts. A half-written line, left by a kill, is cut
    off when the file is opened again, and that decode is made again.

    Raises
    ------
    ValueError
        The file belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))
        whole = self._read()
        if whole:
            check_same_run(path, json.loads(whole[0]), settings)
            for line in whole[1:]:
                record = json.loads(line)
                self.results[record.pop("job")] = record
        self._file = path.open("a", encoding="utf-8")
        if not whole:
            self._write(settings)

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep one result; it is on disk when this returns."""
        self._write({"job": key} | result)
        self.results[key] = result

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> list[str]:
        """Return the whole lines of the file, cutting off a half-written one."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        kept = content[: content.rfind(b"\n") + 1]
        if len(kept) < len(content):
            os.truncate(self.path, len(kept))
        return kept.decode().splitlines()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def check_same_run(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError, naming what differs, if a file's settings are not those of this run."""
    changed = [key for key in wanted | found if found.get(key) != wanted.get(key)]
    if changed:
        key = changed[0]
        values = f" ({found.get(key)!r}, now {wanted.get(key)!r})"
        raise ValueError(
            f"--out: {path} belongs to a run with another {key}"
            f"{values if len(values) <= SHOWN else ''}; name another folder or delete it"
        )
