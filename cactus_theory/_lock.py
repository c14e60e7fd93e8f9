"""One run at a time in a folder: a lock that says who holds it and ends with its process."""

import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

try:
    import fcntl
except ImportError:  # Windows: no such locks
    fcntl = None

NAME = "lock"


class FolderLock:
    """The right to write to a folder, until it is closed or its process ends in any way.

    The file ``lock`` in the folder says who holds it; it is gone once the lock is closed, and
    what a killed process left of it counts for nothing. Where the file system has no locks, a
    line on stderr says so.

    Raises
    ------
    ValueError
        Another process holds it.
    OSError
        The folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._file = self._opened()
        while self._taken() and not self._is_there():  # its last holder took the file away
            self._file.close()
            self._file = self._opened()
        self._file.truncate(0)
        self._file.write(
            f"process {os.getpid()} on {socket.gethostname()} "
            f"since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        )
        self._file.flush()

    def close(self) -> None:
        """Let others write to the folder."""
        if not self._file.closed:
            self.path.unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self) -> IO[str]:
        return self.path.open("a+", encoding="utf-8")

    def _taken(self) -> bool:
        """Take the lock; return whether this file system has any."""
        folder = self.path.parent
        try:
            if fcntl is None:
                raise OSError("none on this system")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ValueError(
                f"{folder}: another run is writing to it ({holder}); wait for it to end, or name "
                "another folder"
            ) from None
        except OSError as error:
            print(
                f"{folder}: no locks here ({error.strerror or error}); start no other run on it",
                file=sys.stderr,
            )
            return False
        return True

    def _is_there(self) -> bool:
        """Return whether the open file still is the one in the folder."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False
