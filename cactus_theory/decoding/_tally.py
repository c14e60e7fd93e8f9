"""Count what the rounds of a decode did, and make the result of it."""

from collections.abc import Sequence
from typing import Any

import torch

from cactus_theory.decoding.readings import Kind, pooled
from cactus_theory.decoding.result import GenerationResult


class Tally:
    """The rounds and the finished texts of a decode.

    Attributes
    ----------
    rounds : for each text (drafted, accepted, ended inside) → how many rounds did that.
    finished : place in the batch → (new ids, whether the text ended by itself).
    """

    def __init__(self, batch: int, width: int) -> None:
        self.batch, self.width = batch, width
        self.rounds: list[dict[Kind, int]] = [{} for _ in range(batch)]
        self.finished: dict[int, tuple[list[int], bool]] = {}

    def note(
        self, place: int, drafted: int, own: Sequence[int], emitted: Sequence[int]
    ) -> tuple[int, bool]:
        """Count a round of the text ``place`` that verified to ``own`` and took ``emitted`` of it.

        Returns how many drafted tokens it took, and whether the text ended among them.
        """
        accepted = min(len(own) - 1, len(emitted))
        cut = len(emitted) <= len(own) - 1
        kind = (drafted, accepted, cut)
        rounds = self.rounds[place]
        rounds[kind] = rounds.get(kind, 0) + 1
        return accepted, cut

    def stop(self, places: Sequence[int], new: Sequence[list[int]]) -> None:
        """Take the new ids of texts that will not go on."""
        for place, own in zip(places, new, strict=True):
            self.finished.setdefault(place, (own, False))

    def result(self, **figures: Any) -> GenerationResult:
        """Return the texts and the counts, with ``figures`` of :class:`GenerationResult`."""
        finished = [self.finished[place] for place in range(self.batch)]
        new = [ids for ids, _ in finished]
        ended = tuple(own for _, own in finished)
        rounds, longest = pooled(self.rounds), max(map(len, new))
        histogram = [0] * (self.width + 1)
        for (_, accepted, _), times in rounds.items():
            histogram[accepted] += times
        padded = [ids + [-1] * (longest - len(ids)) for ids in new]
        return GenerationResult(
            output_token_ids=torch.tensor(padded, dtype=torch.int64),
            ended=all(ended),
            accepted_histogram=tuple(histogram),
            row_lengths=tuple(map(len, new)),
            row_ended=ended,
            rounds=rounds,
            row_rounds=tuple(self.rounds),
            **figures,
        )
