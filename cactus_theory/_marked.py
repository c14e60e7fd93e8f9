"""JSON files that say which format they are in, and which version of it."""

import json
from pathlib import Path
from typing import Any

from cactus_theory._files import parsed_json, write_whole


def read_marked(path: Path, kind: str | int, *versions: int) -> dict[str, Any]:
    """Return the content of a file of this format and one of these versions.

    A format that is a number is its own version, and no versions are given.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        No JSON, another format or another version.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OSError(f"{path}: must be a readable file; {error.strerror or error}") from None
    content = parsed_json(f"{path}: must be a JSON file", text)
    said = content.get("format") if isinstance(content, dict) else None
    if said != kind or isinstance(said, bool):
        other = "this is something else" if said is None else f"got {said!r:.60}"
        raise ValueError(f"{path}: must say format {kind!r}; {other}")
    if versions and content.get("version") not in versions:
        known = " or ".join(map(str, versions))
        raise ValueError(f"{path}: version must be {known}; got {content.get('version')!r:.60}")
    return content


def write_marked(path: Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Write the content with its format and version, all of it or nothing.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    marked = {"format": kind, "version": version} | content
    write_whole(path, (json.dumps(marked, indent=1, allow_nan=False) + "\n").encode())
