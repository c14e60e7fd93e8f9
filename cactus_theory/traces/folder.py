"""Write and check the folder of a trace: a shard for each text, and a manifest.

The manifest is written last, so that a folder with a manifest is complete. A run that was killed
goes on after the last text that was written.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from cactus_theory.base import arguments as check
from cactus_theory.base.files import NAME as LOCK
from cactus_theory.base.files import (
    FolderLock,
    Resource,
    beside,
    read_marked,
    write_marked,
    write_whole,
)
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.traces.shard import DTYPES, Cycle, Shard, checked, from_bytes, pack, to_bytes

FORMAT, VERSION = "cactus-theory trace", 1
CUT = "cut"  # key of details: mass that cut rows leave to cells; absent if rows are whole
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
CYCLES = "at_least_cycles"
COUNTS = "cycles", "target_rows", "draft_rows"
# most drafted tokens of a cycle; replays have an array entry for each
MOST_DRAFTED = 4096


@dataclass(frozen=True)
class Header:
    """Settings of a logged decode, known before its first text.

    A run goes on in a folder only if the settings are equal, except for the least number of rounds
    to log. ``num_draft_tokens`` is the most tokens of a draft; ``details`` holds all further
    settings on which the content depends.
    """

    vocab_size: int
    num_draft_tokens: int
    dtype: str  # of stored rows
    target: str  # name of the model's folder, without its path
    draft: str  # name of the model's folder, or of the drafter's class
    temperature: float
    seed: int
    eos_token_ids: list[int]  # tokens drafted after one of these are logged, but never emitted
    details: dict[str, Any]

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size V, and the largest number of drafted tokens of a round."""
        return self.vocab_size, self.num_draft_tokens

    @property
    def cuts(self) -> Cuts | None:
        """Return the truncation (top-k and top-p) of the logged rows; None if unknown."""
        return Cuts.of(self.details)

    @property
    def setting(self) -> Setting:
        """Return the setting of the decode; values that are not known are the defaults."""
        logged = {name: self.details.get(name) for name in ("policy", "verifier")}
        logged = {name: spec for name, spec in logged.items() if spec}
        law = {"temperature": self.temperature, "cuts": self.cuts or WHOLE}
        return Setting(num_draft_tokens=self.num_draft_tokens, **logged, **law)

    def flat(self) -> dict[str, Any]:
        """Return all settings, including ``details``, in one dictionary."""
        values = asdict(self)
        return values | values.pop("details")


@dataclass(frozen=True)
class Entry:
    """Entry of the manifest for one shard: its file, counts, size and digest."""

    file: str
    cycles: int
    target_rows: int
    draft_rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The header of a trace and its shards, one for each text, in order."""

    header: Header
    shards: tuple[Entry, ...]

    def total(self, name: str) -> int:
        """Return the sum over all shards of the count ``name``, such as ``cycles``."""
        return sum(getattr(entry, name) for entry in self.shards)


def shard_name(text: int) -> str:
    """Return the name of the file that holds the rounds of a text."""
    return f"text-{text:05d}.safetensors"


def digest(content: bytes) -> str:
    """Return the sha256 of bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check that its parts agree with each other.

    Raises OSError for a file that cannot be read, ValueError for a file that is no valid manifest.
    """
    content = read_marked(path, FORMAT, VERSION)
    header = _header(path, content)
    shards = content.get("shards")
    if not isinstance(shards, list) or not shards:
        raise ValueError(f"{path}: shards must be a list of at least one; got {shards!r}")
    manifest = Manifest(header, tuple(_read_entry(path, item) for item in shards))
    if fault := next(_faults(content, manifest), None):
        raise ValueError(f"{path}: {fault}")
    return manifest


def _faults(content: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    """Yield sentences on parts of a manifest that contradict each other."""
    file, times = Counter(entry.file for entry in manifest.shards).most_common(1)[0]
    if times > 1:
        yield f"each shard must be listed once; got {file!r} {times} times"
    sums = {"texts": ("number of", len(manifest.shards))}
    sums |= {name: ("sum over", manifest.total(name)) for name in COUNTS}
    for name, (what, count) in sums.items():
        if content.get(name) != count:
            yield f"{name} must be the {what} shards, {count}; got {content.get(name)!r:.60}"
    most = manifest.header.num_draft_tokens
    for entry in manifest.shards:
        drafted = entry.target_rows - entry.cycles  # a cycle has one row more than drafted tokens
        sizes = entry.cycles, entry.bytes
        if not 0 <= entry.draft_rows <= drafted <= most * entry.cycles or min(sizes) < 0:
            yield (
                f"{entry.file} must have at most {most} drafted tokens a cycle and a row for each; "
                f"got {entry.cycles} cycles, {entry.target_rows} target rows and "
                f"{entry.draft_rows} draft rows"
            )


def _header(path: Path, content: dict[str, Any]) -> Header:
    """Return the checked header in the content of a manifest."""
    header = Header(**_fields(path, content, Header))
    _check_header(f"{path}: ", header)
    return header


def _check_header(where: str, header: Header) -> None:
    """Raise ValueError for settings that no trace can have; ``where`` starts the message."""
    check.one_of(f"{where}dtype", header.dtype, tuple(DTYPES))
    check.number(f"{where}vocab_size", header.vocab_size, 1, 2**31)  # ids are int32
    check.number(f"{where}num_draft_tokens", header.num_draft_tokens, 1, MOST_DRAFTED)
    check.finite(f"{where}temperature", header.temperature, 0)
    for token in header.eos_token_ids:
        if type(token) is not int or not 0 <= token < 2**63:
            raise ValueError(f"{where}eos_token_ids must be token ids; got {token!r:.60}")
    if (longest := header.details.get("max_new_tokens")) is not None:
        check.whole_number(f"{where}max_new_tokens", longest, 1)


def _read_entry(path: Path, item: Any) -> Entry:
    """Return an entry of the manifest; ValueError if it is no entry or names a file elsewhere."""
    if not isinstance(item, dict):
        raise ValueError(f"{path}: every shard must be an object; got {item!r:.60}")
    entry = Entry(**_fields(path, item, Entry))
    beside(path, entry.file)
    return entry


def _fields(path: Path, content: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass from read content; ValueError for a wrong type."""
    values = {}
    for name, hint in get_type_hints(kind).items():
        value, expected = content.get(name), get_origin(hint) or hint
        if expected is float and type(value) is int:
            value = check.number(f"{path}: {name}", value, -math.inf)
        if type(value) is not expected:  # True is no integer here
            called = expected.__name__
            raise ValueError(f"{path}: {name} must be of type {called}; got {value!r:.60}")
        values[name] = value
    return values


class Folder(Resource):
    """The folder of a trace that is being written; use as a context manager.

    Each shard is written completely or not at all. One process holds the folder until the manifest
    is written. Raises ValueError if a second process holds the folder, or if the folder holds
    something that is not this trace: files of another kind, or a trace with a different header.
    """

    def __init__(self, path: Path, header: Header) -> None:
        _check_header("", header)
        self.path, self.header = path, header
        self.entries: list[Entry] = []
        self.finished = (path / MANIFEST).is_file()
        self._lock = None if self.finished else FolderLock(path)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder, so that other processes can write to it."""
        if self._lock is not None:
            self._lock.close()

    @property
    def texts(self) -> int:
        """Return the number of texts logged so far."""
        return len(self.entries)

    @property
    def cycles(self) -> int:
        """Return the number of rounds logged so far."""
        return sum(entry.cycles for entry in self.entries)

    def add(self, cycles: Sequence[Cycle]) -> None:
        """Write the rounds of the next text; the file is on disk when this method returns."""
        name = shard_name(self.texts)
        shard = pack(cycles, DTYPES[self.header.dtype], self.header.vocab_size)
        ends = [token for token in self.header.eos_token_ids if token < self.header.vocab_size]
        cut = sorted(set(ends)) if CUT in self.header.details else None
        content = to_bytes(checked(name, shard, *self.header.limits), cut)
        write_whole(self.path / name, content)
        self.entries.append(_entry_of(name, shard, content))

    def finish(self) -> None:
        """Write the manifest, completely or not at all, which finishes the trace."""
        manifest = Manifest(self.header, tuple(self.entries))
        content = asdict(self.header) | {"texts": self.texts}
        content |= {name: manifest.total(name) for name in COUNTS}
        content["shards"] = [asdict(entry) for entry in self.entries]
        write_marked(self.path / MANIFEST, FORMAT, VERSION, content)
        (self.path / UNFINISHED).unlink(missing_ok=True)
        self.finished = True

    def _open(self) -> None:
        """Start a trace in an empty folder, or go on with a trace that has an equal header."""
        for name in (MANIFEST, UNFINISHED):
            if (self.path / name).is_file():
                self._compare(name)
                break
        else:  # neither file: the folder is new
            if names := sorted(item.name for item in self.path.iterdir() if item.name != LOCK):
                raise ValueError(
                    f"folder: must be empty or hold a trace; {self.path} holds {names[0]}"
                )
            write_marked(self.path / UNFINISHED, FORMAT, VERSION, asdict(self.header))
        if (self.path / MANIFEST).is_file():
            # ``finish`` of a run that was killed may have left this file
            (self.path / UNFINISHED).unlink(missing_ok=True)
            self.finished = True
        else:
            self._take_up()

    def _compare(self, name: str) -> None:
        """Raise ValueError if the file ``name`` holds another header than ``self.header``."""
        content = read_marked(self.path / name, FORMAT, VERSION)
        stored, current = _header(self.path / name, content).flat(), self.header.flat()
        if name == UNFINISHED:  # the texts logged so far do not depend on how many rounds follow
            stored[CYCLES] = current.get(CYCLES)
        for key in current | stored:
            if (was := stored.get(key)) != (now := current.get(key)):
                said = f"belongs to a trace with another {key} ({was!r}, now {now!r})"
                if key.startswith("prompts"):
                    said = f"was logged with {stored.get('prompts')} other prompts"
                raise ValueError(f"folder: {self.path} {said}; name another or delete it")

    def _take_up(self) -> None:
        """Read the shards of a killed run, and delete its half-written file."""
        for part_file in self.path.glob(".*.safetensors.*"):
            part_file.unlink()
        while (path := self.path / shard_name(self.texts)).is_file():
            content = path.read_bytes()
            shard = from_bytes(str(path), content, *self.header.limits)
            self.entries.append(_entry_of(path.name, shard, content))


def _entry_of(name: str, shard: Shard, content: bytes) -> Entry:
    """Return the manifest's entry for a shard whose file has this content."""
    rows = len(shard.target_log_probs), len(shard.draft_log_probs)
    return Entry(name, len(shard), *rows, len(content), digest(content))
