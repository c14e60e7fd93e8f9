"""Write a trace text by text, so that a run can be killed and taken up again."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import whole_number
from cactus_theory.base.files import NAME as LOCK
from cactus_theory.base.files import FolderLock, write_whole
from cactus_theory.traces._manifest import (
    MANIFEST,
    UNFINISHED,
    Entry,
    Header,
    Manifest,
    digest,
    read_header,
    shard_name,
    write_header,
    write_manifest,
)
from cactus_theory.traces._shard import DTYPES, Cycle, Shard, checked, from_bytes, pack, to_bytes
from cactus_theory.traces.trace import Trace


class Folder:
    """The folder of a trace that is being written; use as a context manager.

    Every shard is there whole or not at all; the manifest comes last. Until then one process
    holds the folder.

    Raises
    ------
    ValueError
        The folder belongs to a trace with another header, holds something else, or another
        process writes to it.
    """

    def __init__(self, path: Path, header: Header) -> None:
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
        """Let others write to the folder."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def texts(self) -> int:
        """Return the number of texts logged so far."""
        return len(self.entries)

    @property
    def cycles(self) -> int:
        """Return the number of cycles logged so far."""
        return sum(entry.cycles for entry in self.entries)

    @property
    def _limits(self) -> tuple[int, int, int | None]:
        return self.header.limits

    def add(self, cycles: Sequence[Cycle]) -> None:
        """Write the next text's cycles; they are on the disk when this returns."""
        name = shard_name(self.texts)
        kind = DTYPES[self.header.dtype], self.header.vocab_size, self.header.trees
        shard = pack(cycles, *kind)
        content = to_bytes(checked(name, shard, *self._limits))
        write_whole(self.path / name, content)
        self.entries.append(_entry(name, shard, content))

    def finish(self) -> None:
        """Write the manifest."""
        write_manifest(self.path / MANIFEST, Manifest(self.header, tuple(self.entries)))
        (self.path / UNFINISHED).unlink(missing_ok=True)
        self.finished = True

    def trace(self) -> Trace:
        """Return what was written."""
        return Trace.open(self.path)

    def _open(self) -> None:
        for name in (MANIFEST, UNFINISHED):
            if (self.path / name).is_file():
                self._compare(name)
                break
        else:
            if found := sorted(item.name for item in self.path.iterdir() if item.name != LOCK):
                raise ValueError(
                    f"folder: must be empty or hold a trace; {self.path} holds {found[0]}"
                )
            write_header(self.path / UNFINISHED, self.header)
        if (self.path / MANIFEST).is_file():
            (self.path / UNFINISHED).unlink(missing_ok=True)
            self.finished = True
        else:
            self._take_up()

    def _compare(self, name: str) -> None:
        found, wanted = (header.flat() for header in (read_header(self.path / name), self.header))
        for key in wanted | found:
            if found.get(key) != wanted.get(key) and key.startswith("prompts"):
                raise ValueError(
                    f"folder: {self.path} was logged with {found.get('prompts')} other prompts; "
                    "name another or delete it"
                )
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"folder: {self.path} belongs to a trace with another {key} "
                    f"({found.get(key)!r}, now {wanted.get(key)!r}); name another or delete it"
                )

    def _take_up(self) -> None:
        """Read what is there; what a kill left of a file that was being written goes."""
        for left in self.path.glob(".*.safetensors.*"):
            left.unlink()
        while (path := self.path / shard_name(self.texts)).is_file():
            content = path.read_bytes()
            shard = from_bytes(str(path), content, *self._limits)
            self.entries.append(_entry(path.name, shard, content))


def save_trace(
    folder: str | Path,
    texts: Iterable[Sequence[Cycle]],
    *,
    vocab_size: int,
    num_draft_tokens: int,
    dtype: str = "float32",
    target: str = "target",
    draft: str = "draft",
    temperature: float = 1.0,
    eos_token_ids: Sequence[int] = (),
    nodes: int | None = None,
) -> Trace:
    """Write cycles of your own, such as those of another engine, as a trace.

    Parameters
    ----------
    folder : a new or empty one.
    texts : the cycles of each text; their ``text`` is not read.
    vocab_size, num_draft_tokens : V, and the most tokens a cycle may have drafted: of trees, in
        one path.
    dtype : of the log-probabilities, float16 or float32.
    target, draft, temperature, eos_token_ids : what is said about the decode.
    nodes : the most tokens a drafted tree may have; None for chains.

    Raises
    ------
    ValueError
        A folder that is not empty, an unknown dtype, rows that are no distributions.

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> cycle = Cycle(0, 0, torch.tensor([1]), rows, rows[:1])
    >>> trace = save_trace("mine", [[cycle, cycle], [cycle]], vocab_size=2, num_draft_tokens=1)
    >>> round(replay(trace, "speculative").tokens_per_call.value, 4)
    2.0
    """
    ends = list(eos_token_ids)
    check.one_of("dtype", dtype, tuple(DTYPES))
    details = {} if nodes is None else {"nodes": whole_number("nodes", nodes, 1)}
    header = Header(
        vocab_size, num_draft_tokens, dtype, target, draft, temperature, 0, ends, details
    )
    with Folder(Path(folder), header) as kept:
        if kept.finished or kept.texts:
            raise ValueError(f"folder: must be empty; {folder} holds a trace")
        for cycles in texts:
            kept.add(cycles)
        kept.finish()
    return kept.trace()


def _entry(name: str, shard: Shard, content: bytes) -> Entry:
    rows = len(shard.target_log_probs), len(shard.draft_log_probs)
    return Entry(name, len(shard), *rows, len(content), digest(content))
