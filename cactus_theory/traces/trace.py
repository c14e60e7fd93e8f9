"""Read a trace from its folder: cycles one by one, cycles in batches, or all rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.divergences.regret import REGRET
from cactus_theory.optimum.regret import losses
from cactus_theory.traces.folder import (
    MANIFEST,
    UNFINISHED,
    Header,
    Manifest,
    digest,
    read_manifest,
)
from cactus_theory.traces.shard import Cycle, Shard, from_bytes

# if so many cycles all have equally long drafts below the manifest's K, K is wrong, not bad luck
ENOUGH_CYCLES = 8
# entries of target rows in a batch: 64 rows at V=2,048, so that arrays fit into a core's cache
ENTRIES = 2**17
# bytes of rows that a trace keeps in memory after reading them
KEPT_BYTES = 2**30


@dataclass(frozen=True)
class Batch:
    """B cycles with K drafted tokens each, all with draft rows or all without.

    Attributes
    ----------
    text, position : (B,) int64; number of the text, and its new tokens before the cycle.
    draft_token_ids : (B, K) int64.
    target_probs : (B, K + 1, V) float64.
    draft_probs : (B, K, V) float64; None for deterministic drafts.
    """

    text: Int[Tensor, "batch"]
    position: Int[Tensor, "batch"]
    draft_token_ids: Int[Tensor, "batch K"]
    target_probs: Float[Tensor, "batch K1 vocab"]
    draft_probs: Float[Tensor, "batch K vocab"] | None


class Trace:
    """The logged cycles of a decode, read from a folder text by text: ``for cycle in trace``.

    Rows are float64, divided by their sum.

    Attributes
    ----------
    folder : path of the folder with the trace's files.
    header : settings of the logged decode.

    Examples
    --------
    >>> rows = torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    >>> cycle = Cycle(0, 0, torch.tensor([1]), rows, rows[:1])
    >>> save_trace("mine", [[cycle, cycle], [cycle]], vocab_size=2, num_draft_tokens=1).name
    'mine'
    >>> trace = Trace.open("mine")
    >>> trace.texts, [cycle.text for cycle in trace]
    (2, [0, 0, 1])
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._kept: dict[str, Shard] = {}  # read and checked, up to KEPT_BYTES

    @classmethod
    def open(cls, folder: str | Path) -> "Trace":
        """Open the trace in a folder.

        The manifest and the files' sizes are checked now, a file's content when it is first read.

        Raises
        ------
        OSError, ValueError
            No such folder, a folder without a finished trace, files that are missing or of a
            different size from the manifest's.
        ModuleNotFoundError
            safetensors is not installed (extra llm).
        """
        place = Path(folder)
        if not place.is_dir():
            raise OSError(f"{place}: must be the folder of a trace; no such folder")
        if not (place / MANIFEST).is_file():
            if (place / UNFINISHED).is_file():
                raise ValueError(
                    f"{place}: must be a finished trace; this one was interrupted, log it again "
                    "with the same arguments, or fewer --cycles, to finish it"
                )
            inner = sorted(path.parent.name for path in place.glob(f"*/{MANIFEST}"))
            several = f"; name one of those in it: {', '.join(inner)}" if inner else ""
            raise ValueError(
                f"{place}: must be the folder of a trace; it has no {MANIFEST}{several}"
            )
        trace = cls(place, read_manifest(place / MANIFEST))
        for entry in trace.manifest.shards:
            path = place / entry.file
            if not path.is_file():
                raise OSError(f"{path}: must be a readable file; no such file")
            if (size := path.stat().st_size) != entry.bytes:
                raise ValueError(f"{path}: must have {entry.bytes} bytes; got {size}")
        return trace

    @property
    def header(self) -> Header:
        """Return the settings of the decode."""
        return self.manifest.header

    @property
    def ends(self) -> list[int]:
        """Return the ids below V that end the texts, each once, in ascending order."""
        ids = sorted(set(self.header.eos_token_ids))
        return [token for token in ids if token < self.header.vocab_size]

    @property
    def unit(self) -> Divergence:
        """Return the divergence in which tokens are charged: regret at temperature 0, else KL."""
        return read_divergence(defaults.DIVERGENCE) if self.header.temperature else REGRET

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.folder.resolve().name

    @property
    def num_draft_tokens(self) -> int:
        """Return K, the most drafted tokens of a cycle."""
        return self.header.num_draft_tokens

    @property
    def texts(self) -> int:
        """Return the number of texts."""
        return len(self.manifest.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the trace's content, from the digests of the shards."""
        return digest("".join(entry.sha256 for entry in self.manifest.shards).encode())

    @property
    def prompts(self) -> list[int]:
        """Return the index of each text's prompt; texts of the same prompt have the same index."""
        count = self.header.details.get("prompts")
        count = count if isinstance(count, int) and count > 0 else self.texts
        return [text % count for text in range(self.texts)]

    def __len__(self) -> int:
        """Return the number of cycles."""
        return self.manifest.total("cycles")

    def __iter__(self) -> Iterator[Cycle]:
        """Yield every cycle, text after text."""
        for text in range(self.texts):
            shard = self.shard(text)
            kinds = zip(shard.counts, shard.deterministic, strict=True)
            for number, (count, deterministic) in enumerate(kinds):
                batch = _batch(text, shard, [number], count, deterministic)
                p = None if batch.draft_probs is None else batch.draft_probs[0]
                rows = batch.draft_token_ids[0], batch.target_probs[0], p
                yield Cycle(text, int(batch.position[0]), *rows)

    def shard(self, text: int) -> Shard:
        """Read the stored cycles of one text.

        The first shards that are read stay in memory, up to a limit (``KEPT_BYTES``), because
        tuning reads a trace many times.

        Raises
        ------
        OSError, ValueError
            A file that cannot be read, has changed since logging, or contradicts the manifest.
        """
        entry = self.manifest.shards[text]
        if entry.file in self._kept:
            return self._kept[entry.file]
        path = self.folder / entry.file
        content = path.read_bytes()
        if digest(content) != entry.sha256:
            raise ValueError(f"{path}: must be the file that was logged; its sha256 differs")
        shard = from_bytes(str(path), content, *self.header.limits)
        counts = len(shard), len(shard.target_log_probs), len(shard.draft_log_probs)
        if counts != (entry.cycles, entry.target_rows, entry.draft_rows):
            raise ValueError(
                f"{path}: cycles, target rows and draft rows must be as the manifest says; "
                f"got {counts}"
            )
        if sum(held.nbytes for held in (shard, *self._kept.values())) <= KEPT_BYTES:
            self._kept[entry.file] = shard
        return shard

    def batches(self, entries: int, num_draft_tokens: int | None = None) -> Iterator[Batch]:
        """Yield all cycles in batches with at most ``entries`` numbers in their target rows.

        No cycle is split, so a batch may be larger if it has one cycle. ``num_draft_tokens`` cuts
        longer drafts. Cycles of a text come in order of the lengths of their drafts.

        Raises
        ------
        OSError, ValueError
            As :meth:`shard`; after the last batch, if K is not the manifest's.
        """
        most = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        lengths: set[int] = set()
        for text in range(self.texts):
            shard = self.shard(text)
            lengths |= set(shard.counts)
            # cycles of one batch have equally long drafts, all with draft rows or all without
            numbers_by_kind: dict[tuple[int, bool], list[int]] = {}
            kinds = zip(shard.counts, shard.deterministic, strict=True)
            for number, (count, deterministic) in enumerate(kinds):
                numbers_by_kind.setdefault((min(count, most), deterministic), []).append(number)
            for (width, deterministic), numbers in sorted(numbers_by_kind.items()):
                size = max(1, entries // ((width + 1) * self.header.vocab_size))
                for start in range(0, len(numbers), size):
                    yield _batch(text, shard, numbers[start : start + size], width, deterministic)
        self._check_drafted(lengths)

    @cached_property
    def losses(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return a tuple for each batch, as a policy of regret reads it.

        The tuple has the texts (B,), the drafted ids (B, K), the regret of each drafted token, and
        whether the token is the first argmax of its row.
        """
        found = []
        for batch in self.batches(ENTRIES):
            ids = batch.draft_token_ids
            found.append((batch.text, ids, *losses(batch.target_probs[:, :-1], ids)))
        return found

    def rows(self) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows vocab"]]:
        """Return all draft rows and the target rows at the same places, target first, float64.

        Raises
        ------
        ValueError
            Every draft of the trace was deterministic, so that there are no draft rows.
        """
        pairs = [(c.target_probs[:-1], c.draft_probs) for c in self if c.draft_probs is not None]
        if not pairs:
            raise ValueError(
                f"{self.folder}: must hold draft rows; every draft in it was deterministic"
            )
        target, draft = map(torch.cat, zip(*pairs, strict=True))
        return target, draft

    def _check_drafted(self, lengths: set[int]) -> None:
        """Raise ValueError if all cycles drafted equally many tokens, but not the manifest's K."""
        longest, enough = max(lengths, default=0), len(self) >= ENOUGH_CYCLES
        if enough and lengths == {longest} and 0 < longest < self.num_draft_tokens:
            raise ValueError(
                f"{self.folder / MANIFEST}: num_draft_tokens must be the {longest} that every "
                f"cycle drafted; got {self.num_draft_tokens}"
            )


def _probs(rows: Tensor) -> Tensor:
    """Return stored log-probabilities as float64 probabilities, divided by their sums."""
    probs = rows.double().exp()
    return probs / probs.sum(-1, keepdim=True)


def _batch(text: int, shard: Shard, numbers: list[int], width: int, deterministic: bool) -> Batch:
    """Return cycles of a shard, by their numbers, as a batch; drafts are cut to ``width``."""
    cycles = torch.tensor(numbers, device="cpu")
    place = torch.arange(width + 1, device="cpu")
    first_token = shard.token_offsets[cycles, None]
    draft_rows = shard.draft_offsets[cycles, None] + place[:-1]
    without_rows = deterministic or not width
    return Batch(
        text=torch.full_like(cycles, text),
        position=shard.position[cycles].long(),
        draft_token_ids=shard.draft_token_ids[first_token + place[:-1]].long(),
        # every cycle before has a target row more than tokens
        target_probs=_probs(shard.target_log_probs[first_token + cycles[:, None] + place]),
        draft_probs=None if without_rows else _probs(shard.draft_log_probs[draft_rows]),
    )
