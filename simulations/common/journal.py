"""Finished work that survives being killed: a file with one JSON line for each piece."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cactus_theory.base.files import FolderLock, Resource, write_whole
from cactus_theory.base.terminal import Progress

# longer settings, such as the contents of files, are not shown where they differ
SHOWN = 200
T = TypeVar("T")


class Journal(Resource):
    """Results by job key; the first line holds the settings of the run.

    A line is on disk before the next decode starts. A half-written line, left by a kill, is cut
    off when the file is opened again, and that decode is made again. Other damaged lines are
    named, or moved to FILE.damaged with ``set_aside``. One process at a time holds the folder.
    Raises ValueError for a file of a run with other settings, a damaged line, a folder that
    another process writes to.
    """

    def __init__(self, path: Path, settings: dict[str, Any], set_aside: bool = False) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        settings = json.loads(json.dumps(settings))
        self._lock = FolderLock(path.parent)
        try:
            stored = self._read(set_aside)
            if stored is not None:
                check_same_run(path, stored, settings)
            self._file = path.open("a", encoding="utf-8")
        except BaseException:
            self._lock.close()
            raise
        if stored is None:
            self._write(settings)

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keep one result; it is on disk when this returns."""
        self._write({"job": key} | result)
        self.results[key] = result

    def close(self) -> None:
        """Close the file, and let others write to it."""
        self._file.close()
        self._lock.close()

    def _read(self, set_aside: bool) -> dict[str, Any] | None:
        """Take the whole lines of the file; return the settings in the first, None without."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = io.BytesIO(content).readlines()
        half = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if not lines:
            self._keep([], [], half)
            return None
        settings = _record(lines[0])
        if settings is None:
            raise ValueError(
                f"{self.path}, line 1: damaged, and it holds the settings of the run; name "
                "another folder or delete it"
            )
        whole_lines, damaged = lines[:1], []
        for number, line in enumerate(lines[1:], 2):
            record = _record(line)
            if record is not None and "job" in record:
                self.results[record.pop("job")] = record
                whole_lines.append(line)
            elif set_aside:
                damaged.append(line)
            else:
                raise ValueError(
                    f"{self.path}, line {number}: damaged; --set-aside-damaged moves such lines to "
                    f"{self.path.name}.damaged and makes their results again"
                )
        self._keep(whole_lines, damaged, half)
        return settings

    def _keep(self, whole_lines: list[bytes], damaged: list[bytes], half: bytes) -> None:
        """Leave whole lines in the file; damaged ones go to another, what is half-written goes."""
        if damaged:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            earlier = aside.read_bytes() if aside.exists() else b""
            write_whole(aside, earlier + b"".join(damaged))
            print(f"{len(damaged)} damaged lines are now in {aside}", file=sys.stderr)
        if damaged or half:
            write_whole(self.path, b"".join(whole_lines))

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def fill(
    todo: Mapping[str, T],
    make: Callable[[T], dict[str, Any]],
    journal: Journal | None,
    label: str,
    note: Callable[[T], str] = lambda _: "",
) -> dict[str, dict[str, Any]]:
    """Make what the journal lacks, showing progress, and return all results by key.

    ``todo`` is key → what ``make`` makes a result of; the progress line says ``label``, and of
    each piece its ``note``. The journal keeps each result before the next one is made.
    """
    results = {} if journal is None else journal.results
    missing = {key: piece for key, piece in todo.items() if key not in results}
    with Progress(label, len(todo), len(todo) - len(missing)) as progress:
        for key, piece in missing.items():
            result = make(piece)
            if journal is None:
                results[key] = result
            else:
                journal.add(key, result)
            progress.advance(note(piece))
    return results


def add_journal_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flag of commands that keep a journal."""
    parser.add_argument(
        "--set-aside-damaged",
        action="store_true",
        help="move damaged lines of the journal to journal.jsonl.damaged, make those results again",
    )


def _record(line: bytes) -> dict[str, Any] | None:
    """Return what a line of the journal holds, None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def check_same_run(path: Path, stored: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ValueError, naming what differs, if a file's settings are not those of this run."""
    changed = [key for key in settings | stored if stored.get(key) != settings.get(key)]
    if changed:
        key = changed[0]
        values = f" ({stored.get(key)!r}, now {settings.get(key)!r})"
        raise ValueError(
            f"--out: {path} belongs to a run with another {key}"
            f"{values if len(values) <= SHOWN else ''}; name another folder or delete it"
        )
