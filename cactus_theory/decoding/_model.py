"""A causal LM with its own cache: feed tokens, read logits, take tokens back."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._cache import allocate, row_cache
from cactus_theory.decoding._lean import LeanModel, recognises


class CachedModel:
    """One Hugging Face causal LM and the positions each row has consumed.

    A recognised model runs the whole batch in one lean forward pass; any other runs the
    library's own forward pass row by row, each row a batch of its own.

    Attributes
    ----------
    lengths : number of tokens in the cache, a row each.
    calls : number of forward passes so far (of the batch).
    """

    def __init__(
        self, model: Any, capacity: int, batch: int = 1, *, slack: int = 0, lean: bool = True
    ) -> None:
        self.model = model
        self.cache = allocate(model, batch, capacity + slack)
        self.lengths = self.cache.lengths
        self.calls = 0
        self.lean = None
        if lean and recognises(model, capacity):
            self.lean = LeanModel(model, self.cache)
            return
        self.rows = [row_cache(self.cache, row) for row in range(batch)]
        self._slices = "logits_to_keep" in inspect.signature(model.forward).parameters

    def feed(
        self, token_ids: Int[Tensor, "batch new"], counts: Sequence[int], keep: Sequence[int]
    ) -> Float[Tensor, "batch kept vocab"]:
        """Consume ``counts[b]`` tokens behind the cached ones of row b.

        Returns the logits after the last ``keep[b]`` of them, first in their row; what stands
        behind those, and behind a row that consumes nothing, is no one's.
        """
        self.calls += 1
        if self.lean is None:
            return self._row_by_row(token_ids, counts, keep)
        batch, new = token_ids.shape
        ragged = batch > 1 and len(set(self.lengths)) > 1
        hidden = self.lean(token_ids, ragged)
        first = [count - kept if kept else 0 for count, kept in zip(counts, keep, strict=True)]
        most = max(keep)
        if batch == 1 or (min(first) == max(first) and first[0] + most <= new):
            hidden = hidden[:, first[0] : first[0] + most]
        else:
            at = torch.tensor(first, device=hidden.device)[:, None]
            at = (at + torch.arange(most, device=hidden.device)).clamp(max=new - 1)
            hidden = hidden[torch.arange(batch, device=hidden.device)[:, None], at]
        for row, count in enumerate(counts):
            self.lengths[row] += count
        return self.lean.logits(hidden)

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a row."""
        self.cache.rollback(row, length)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order (no row before its old place)."""
        if self.lean is not None:
            self.cache.keep(rows)
            return
        self.rows = [self.rows[row] for row in rows]  # each knows its place in memory
        self.lengths[:] = [self.lengths[row] for row in rows]

    def _row_by_row(
        self, token_ids: Int[Tensor, "batch new"], counts: Sequence[int], keep: Sequence[int]
    ) -> Float[Tensor, "batch kept vocab"]:
        logits: list[Tensor | None] = [None] * len(counts)
        for row, (count, kept) in enumerate(zip(counts, keep, strict=True)):
            if not count:
                continue
            for layer in self.rows[row].layers:
                layer.length = self.lengths[row]
            options = {"logits_to_keep": kept} if self._slices else {}
            output = self.model(
                input_ids=token_ids[row : row + 1, :count],
                past_key_values=self.rows[row],
                use_cache=True,
                **options,
            )
            self.lengths[row] += count
            logits[row] = output.logits[:, output.logits.shape[1] - kept :]
        if len(logits) == 1:
            return logits[0]  # type: ignore[return-value]
        some = next(row for row in logits if row is not None)
        padded = some.new_zeros(len(counts), max(keep), some.shape[-1])
        for row, own in enumerate(logits):
            if own is not None:
                padded[row, : own.shape[1]] = own[0]
        return padded
