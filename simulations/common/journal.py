"""Keep finished jobs in a file, one JSON line a job, so that a killed run can be resumed."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cactus_theory.base.files import FolderLock, Resource, write_whole
from cactus_theory.base.terminal import Progress

Record = dict[str, Any]
# most characters of a differing setting that an error shows; contents of files are longer
SHOWN = 200


class Journal(Resource):
    """The results of a run by job key, in a file whose first line has the run's settings.

    Each line is on disk before the next job starts. A half-written line that a kill left behind is
    cut off when the file is opened again, and its job is run again. A lock keeps other processes
    out of the folder. Raises ValueError for a file of a run with other settings, for a damaged
    line, and for a folder that another process writes to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        settings = json.loads(json.dumps(settings))
        self._lock = FolderLock(path.parent)
        try:
            stored = self._read()
            if stored is not None:
                self._check_same_run(stored, settings)
            self._file = path.open("a", encoding="utf-8")
        except BaseException:
            self._lock.close()
            raise
        if stored is None:
            self._write(settings)

    def add(self, key: str, result: dict[str, Any]) -> None:
        self._write({"job": key} | result)
        self.results[key] = result

    def check(self, fault: Callable[[str, dict[str, Any]], str | None]) -> None:
        """Raise ValueError for the first kept result in which ``fault`` names a wrong column."""
        for number, (key, result) in enumerate(self.results.items(), 2):
            if (found := fault(key, result)) is not None:
                raise self._damaged(number, f", column {found}")

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _read(self) -> dict[str, Any] | None:
        """Read the complete lines of the file; return the settings, or None for a new file."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            write_whole(self.path, whole)
        if not whole:
            return None
        settings, *records = whole.splitlines()
        for number, line in enumerate(records, 2):
            record = self._record(number, line)
            if "job" not in record:
                raise self._damaged(number)
            self.results[record.pop("job")] = record
        return self._record(1, settings)

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise self._damaged(number)
        return record

    def _damaged(self, number: int, fault: str = ": damaged") -> ValueError:
        advice = "it holds the settings of the run; name another folder or delete the file"
        if number > 1:
            advice = "delete it and its result is made again"
        return ValueError(f"{self.path}, line {number}{fault}; {advice}")

    def _check_same_run(self, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        changed = [key for key in {**settings, **stored} if stored.get(key) != settings.get(key)]
        if changed:
            key = changed[0]
            values = f" ({stored.get(key)!r}, now {settings.get(key)!r})"
            raise ValueError(
                f"{self.path} belongs to a run with another {key}"
                f"{values if len(values) <= SHOWN else ''}; name another folder or delete it"
            )

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def filled(
    jobs: Mapping[str, Callable[[], Record]],
    journal: Journal | None,
    doing: str,
    client: Any = None,
) -> dict[str, Record]:
    """Make the jobs that the journal lacks, and return the record of every job.

    Each record is kept in the journal as soon as it is made; without one nothing is kept. Jobs run
    one by one in this process, or with a Dask ``client`` on its workers, to which they must be
    possible to pickle. The jobs of a worker that dies are given to another one.
    """
    results = {} if journal is None else journal.results
    missing = [key for key in jobs if key not in results]
    progress = Progress(doing, len(jobs), len(jobs) - len(missing))
    keep = results.__setitem__ if journal is None else journal.add
    for key, record in _made({key: jobs[key] for key in missing}, client):
        keep(key, record)
        progress.advance()
    return {key: results[key] for key in jobs}


def _made(jobs: Mapping[str, Callable[[], Record]], client: Any) -> Iterator[tuple[str, Record]]:
    """Yield each job's record; those of a cluster in the order in which they are finished."""
    if client is None:
        yield from ((key, job()) for key, job in jobs.items())
        return
    from distributed import as_completed  # pyright: ignore[reportMissingImports]

    keys = {client.submit(job, pure=False): key for key, job in jobs.items()}
    for future in as_completed(keys):
        yield keys[future], future.result()
