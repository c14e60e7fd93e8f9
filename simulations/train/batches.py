"""Texts of pieces on disk, in batches of an order that follows from a seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor

from .samples import Piece
from .unroll import Batch

# batches among which texts are sorted
SORTED = 16


@dataclass(frozen=True)
class Texts:
    """All texts of some pieces: the files are read where they are asked for."""

    paths: Sequence[Path]
    embedding: Float[Tensor, "vocab hidden"]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Return the pieces; their states stay on disk until they are read."""
        return [Piece.read(path) for path in self.paths]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Return piece, first token and length of every text of which some row counts."""
        found = []
        for number, piece in enumerate(self.pieces):
            ends = piece.lengths.cumsum(0)
            for end, length in zip(ends.tolist(), piece.lengths.tolist(), strict=True):
                if not piece.norms[end - length + 1 : end - 1].isnan().all():
                    found.append((number, end - length, length))
        return found

    @cached_property
    def rows(self) -> int:
        """Return the mean number of rows that count in a text."""
        count = sum(int((~piece.norms.isnan()).sum()) for piece in self.pieces)
        return max(round(count / max(len(self.places), 1)), 1)

    def batch(
        self, numbers: Sequence[int], most: int | None = None, source: Generator | None = None
    ) -> Batch:
        """Return some texts, shorter ones with units that do not count behind theirs.

        At most ``most`` units of a text are anchors, drawn by ``source``.
        """
        texts = [self._text(*self.places[number]) for number in numbers]
        units = max(len(text[0]) for text in texts)
        embedded, states, rows, norms = (
            torch.stack([F.pad(part, (0, 0) * (part.ndim - 1) + (0, units - len(part)), value=value)
                         for part in parts])
            for parts, value in zip(zip(*texts, strict=True), (0, 0, 0, torch.nan), strict=True)
        )  # fmt: skip
        counts = ~norms.isnan()
        likely = counts.double() if source is None else torch.rand(
            counts.shape, generator=source, dtype=torch.float64
        ).add_(1).mul_(counts)  # fmt: skip
        size = min(most or units, int(counts.sum(1).max()))
        anchors = likely.sort(dim=1, descending=True, stable=True).indices[:, :size]
        real = counts.gather(1, anchors)
        return Batch(embedded, states, rows, norms.nan_to_num(), counts, anchors, real)

    def _text(self, number: int, start: int, length: int) -> tuple[Tensor, ...]:
        piece, end = self.pieces[number], start + length - 1
        embedded = self.embedding[piece.ids[start + 1 : end].long()]
        states = piece.states[start:end]
        return embedded, states[:-1, :-1].flatten(1), states[1:, -1], piece.norms[start + 1 : end]

    def shuffled(self, size: int, most: int, seed: int) -> Callable[[int, Generator], Batch]:
        """Return a batch for each step; every text is seen about once an epoch.

        Texts are sorted by length among every ``SORTED`` batches, which then waste little.
        """
        count = len(self.places)
        steps = max(count // size, 1)

        def batch(step: int, source: Generator) -> Batch:
            epoch, at = divmod(step, steps)
            shuffle = Generator().manual_seed(seed * 100_003 + epoch)
            order = torch.randperm(count, generator=shuffle).tolist()
            start = at // SORTED * SORTED * size
            some = sorted(order[start : start + SORTED * size], key=lambda n: self.places[n][2])
            turns = torch.randperm(SORTED, generator=shuffle)  # of batches, which differ in length
            whole = [int(turn) for turn in turns if (int(turn) + 1) * size <= len(some)] or [0]
            first = whole[at % SORTED % len(whole)] * size
            return self.batch(some[first : first + size], most, source)

        return batch


def embedding_of(target: Any) -> Float[Tensor, "vocab hidden"]:
    """Return a target's embedding, without gradient."""
    return target.get_input_embeddings().weight.detach()
