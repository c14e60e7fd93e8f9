"""What a trace folder says about itself; written last, so that a folder with it is whole."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from cactus_theory._marked import read_marked, write_marked
from cactus_theory.traces._shard import DTYPES

FORMAT, VERSION = "cactus-theory trace", 1
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"


@dataclass(frozen=True)
class Header:
    """What is known before the first text is decoded.

    Attributes
    ----------
    vocab_size, num_draft_tokens, dtype : V, the most tokens a cycle may have drafted, and how
        rows are stored.
    target, draft : names of the models (of their folders) or of the drafter.
    temperature, seed, eos_token_ids : of the decode; tokens after an end-of-text token
        that was drafted are logged, but no decode would emit them.
    details : whatever else decides the content; a folder is taken up again only if it is equal.
    """

    vocab_size: int
    num_draft_tokens: int
    dtype: str
    target: str
    draft: str
    temperature: float
    seed: int
    eos_token_ids: list[int]
    details: dict[str, Any]

    def flat(self) -> dict[str, Any]:
        """Return everything that makes the content what it is, in one level."""
        values = asdict(self)
        return values | values.pop("details")


@dataclass(frozen=True)
class Entry:
    """One shard: its file, what it holds, and how to know that it is the same."""

    file: str
    cycles: int
    target_rows: int
    draft_rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The header and the shards, one a text, in order."""

    header: Header
    shards: tuple[Entry, ...]

    def total(self, name: str) -> int:
        """Return the sum of a count over the shards."""
        return sum(getattr(entry, name) for entry in self.shards)


def shard_name(text: int) -> str:
    """Return the file name of a text's shard."""
    return f"text-{text:05d}.safetensors"


def digest(content: bytes) -> str:
    """Return the sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_header(path: Path, header: Header) -> None:
    """Write what an unfinished folder is to become."""
    write_marked(path, FORMAT, VERSION, asdict(header))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest, all of it or nothing."""
    totals = {name: manifest.total(name) for name in ("cycles", "target_rows", "draft_rows")}
    shards = [asdict(entry) for entry in manifest.shards]
    write_marked(
        path,
        FORMAT,
        VERSION,
        asdict(manifest.header) | {"texts": len(shards)} | totals | {"shards": shards},
    )


def read_header(path: Path) -> Header:
    """Return the header of an unfinished folder, or of a manifest.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, or of something else.
    """
    return _header(path, read_marked(path, FORMAT, VERSION))


def read_manifest(path: Path) -> Manifest:
    """Return a manifest whose parts agree with each other.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, or of something else.
    """
    content = read_marked(path, FORMAT, VERSION)
    header = _header(path, content)
    shards = content.get("shards")
    if not isinstance(shards, list) or not shards:
        raise ValueError(f"{path}: shards must be a list of at least one; got {shards!r}")
    manifest = Manifest(header, tuple(_entry(path, item) for item in shards))
    for name in ("cycles", "target_rows", "draft_rows"):
        if content.get(name) != manifest.total(name):
            raise ValueError(
                f"{path}: {name} must be the sum over shards, {manifest.total(name)}; "
                f"got {content.get(name)!r}"
            )
    return manifest


def _header(path: Path, content: dict[str, Any]) -> Header:
    values = _fields(path, content, Header)
    header = Header(**values)
    if header.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype must be one of {', '.join(DTYPES)}; got {header.dtype!r}")
    for name in ("vocab_size", "num_draft_tokens"):
        value = values[name]
        if value < 1:
            raise ValueError(f"{path}: {name} must be at least 1; got {value!r}")
    return header


def _entry(path: Path, item: Any) -> Entry:
    if not isinstance(item, dict):
        raise ValueError(f"{path}: every shard must be an object; got {item!r}")
    entry = Entry(**_fields(path, item, Entry))
    if Path(entry.file).name != entry.file:  # a manifest names files of its own folder only
        raise ValueError(f"{path}: file must be a name without a folder; got {entry.file!r}")
    return entry


def _fields(path: Path, content: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the fields of ``kind``, each of its type."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        value, wanted = content.get(name), get_origin(hint) or hint
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:  # True is no integer here
            raise ValueError(f"{path}: {name} must be of type {wanted.__name__}; got {value!r}")
        found[name] = value
    return found
