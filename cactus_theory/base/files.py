"""Files written whole or not at all, JSON that says its format, one writer a folder at a time."""

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Self

try:
    import fcntl
except ImportError:  # Windows: no such locks
    fcntl = None

NAME = "lock"


def write_whole(path: str | Path, content: bytes) -> None:
    """Write ``content`` to ``path``: all of it, or nothing if writing fails or is interrupted.

    An existing file is replaced only after the new content is on the disk. OSError for a file that
    cannot be written.
    """
    place = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise OSError(f"{path}: must be a writable file; {error.strerror or error}") from None


def beside(path: str | Path, name: Any) -> Path:
    """Return the path of a file that the data file ``path`` names: one in its own folder.

    ValueError for anything but a plain name, and for a link that leads out of the folder.
    """
    folder = Path(path).parent
    plain = isinstance(name, str) and name.isprintable() and not set(name) & set("/\\")
    if not plain or name in ("", ".", ".."):
        raise ValueError(f"{path}: must name files of its own folder; got {name!r}")
    if (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"{path}: must name files of its own folder; {name!r} leads out of it")
    return folder / name


def parsed_json(rule: str, text: str | bytes) -> Any:
    """Return what a JSON text holds.

    ValueError, whose message begins with ``rule``, for no JSON, or one too deep or with integers
    too long to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule}; {first_line(error)}") from None


def read_marked(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the content of a file of this format and version.

    OSError for a file that cannot be read; ValueError for no JSON, another format or version.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OSError(f"{path}: must be a readable file; {error.strerror or error}") from None
    content = parsed_json(f"{path}: must be a JSON file", text)
    format_name = content.get("format") if isinstance(content, dict) else None
    if format_name != kind:
        other = "this is something else" if format_name is None else f"got {format_name!r:.60}"
        raise ValueError(f"{path}: must say format {kind!r}; {other}")
    if content.get("version") != version:
        raise ValueError(f"{path}: version must be {version}; got {content.get('version')!r:.60}")
    return content


def write_marked(path: Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Write the content with its format and version, as :func:`write_whole` does."""
    marked = {"format": kind, "version": version} | content
    write_whole(path, (json.dumps(marked, indent=1, allow_nan=False) + "\n").encode())


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return str(error).partition("\n")[0]


class Resource:
    """What ``with`` closes at its end."""

    def close(self) -> None:
        """Let go of what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FolderLock(Resource):
    """The right to write to a folder, until it is closed or its process ends in any way.

    The file ``lock`` in the folder says who holds it; it is gone once the lock is closed, and
    what a killed process left of it counts for nothing. Where the file system has no locks, a
    line on stderr says so. ValueError if another process holds it, OSError for a folder that
    cannot be written to.
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
