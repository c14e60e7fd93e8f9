"""Write files whole or not at all, read JSON with a format and version, lock folders."""

import json
import os
import tempfile
from errno import EISDIR
from pathlib import Path
from typing import Any, Self, cast

from cactus_theory.base import arguments as check

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
            mask = os.umask(0)  # reading the mask means setting it
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise OSError(f"{path}: must be a writable file; {error.strerror or error}") from None


def check_writable(
    flag: str, path: str | Path | None, *suffixes: str, folders: bool = False
) -> None:
    """Raise an error, before a command does any work, if the file ``path`` cannot be written.

    ``path`` must have one of ``suffixes``, if any are given; None is not checked. With ``folders``
    the caller makes missing folders later, and a path without .csv may be a folder. Nothing is made
    here. ValueError for another suffix; OSError if ``path`` is a folder or cannot be written.
    """
    if path is None:
        return
    place = Path(path)
    if suffixes and place.suffix not in suffixes:
        raise ValueError(f"{flag}: must end in {', '.join(suffixes)}; got {str(path)!r}")
    try:
        if place.is_dir() and (not folders or place.suffix == ".csv"):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        folder = place.parent
        if folders:  # the nearest folder that exists
            existing = (parent for parent in place.parents if parent.exists())
            folder = place if place.is_dir() else next(existing)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"{flag}: must be a writable file; {error.strerror}: {path}") from None


def beside(path: str | Path, name: Any) -> Path:
    """Return the path of a file that the data file ``path`` names, in the folder of ``path``.

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
    """Return the value of a JSON text.

    ValueError, whose message begins with ``rule``, for text that is not JSON, is nested too deeply
    or has integers too long to read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule}; {first_line(error)}") from None


def read_marked(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the content of a JSON file whose format is ``kind`` and whose version is ``version``.

    OSError for a file that cannot be read; ValueError for another content, format or version.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OSError(f"{path}: must be a readable file; {error.strerror or error}") from None
    parsed = parsed_json(f"{path}: must be a JSON file", text)
    content = cast(dict[str, Any], parsed) if isinstance(parsed, dict) else {}
    if (format_name := content.get("format")) != kind:
        other = "this is something else" if format_name is None else f"got {format_name!r:.60}"
        raise ValueError(f"{path}: must say format {kind!r}; {other}")
    if content.get("version") != version:
        raise ValueError(f"{path}: version must be {version}; got {content.get('version')!r:.60}")
    return content


def write_marked(path: Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Write a JSON file of the format ``kind``, as :func:`write_whole` writes bytes."""
    marked = {"format": kind, "version": version} | content
    write_whole(path, (json.dumps(marked, indent=1, allow_nan=False) + "\n").encode())


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


class Resource:
    """Base class of objects that a ``with`` block closes."""

    def close(self) -> None:
        """Release the resource."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FolderLock(Resource):
    """The right to write to a folder, until the lock is closed or its process ends in any way.

    The file ``lock`` stays in the folder and has no effect once no process holds it. ValueError if
    another process holds the lock, OSError for a folder in which no file can be locked,
    ModuleNotFoundError without filelock (extra llm).
    """

    def __init__(self, folder: Path) -> None:
        library = check.optional_module("filelock", "llm")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = library.FileLock(folder / NAME, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except library.Timeout:
            raise ValueError(
                f"{folder}: another run is writing to it; wait for it to end, or name another "
                "folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise OSError(
                f"{folder}: must be a folder with a file {NAME!r} that can be locked; "
                f"{getattr(error, 'strerror', None) or error}"
            ) from None

    def close(self) -> None:
        """Give up the right, so that other processes may write to the folder."""
        self._lock.release()
