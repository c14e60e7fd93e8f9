"""The text that ids add to a prompt, and ids for the library's streamers as they are verified."""

from collections import deque
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor


def completion(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ``ids`` add to a prompt, without special tokens.

    That is the text of all ids without that of the prompt, as the first token of a text may lose
    its blank, and others may be written otherwise at the start.
    """
    texts = [*prompt_ids], [*prompt_ids, *ids]
    before, whole = (tokenizer.decode(text, skip_special_tokens=True) for text in texts)
    return whole[len(commonprefix([before, whole])) :]


class Columns:
    """Hands ids to criteria and to a streamer as the library's ``generate`` does: place by place.

    Rows advance at their own pace, so a place waits for the slowest open row. ``pad`` follows a
    text that has ended, and one that criteria have ended (``done``): without it these go on, as in
    the library without an end-of-text id, until all have. ``ids`` are prompts and places.
    """

    def __init__(
        self, ids: Tensor, pad: int, streamer: Any, criteria: Sequence[Any], padded: bool
    ) -> None:
        self.ids, self.pad, self.padded = ids, pad, padded
        self.streamer, self.criteria = streamer, criteria
        self.waiting: list[deque[int]] = [deque() for _ in ids]
        self.over, self.done = [False] * len(ids), [False] * len(ids)

    def add(self, new: Sequence[Sequence[int]]) -> None:
        """Take the ids of a round, those of each row; a row with none has ended."""
        for row, ids in enumerate(new):
            self.waiting[row].extend(ids)
            self.over[row] |= not ids
        while all(map(self._ready, range(len(self.waiting)))) and self._put():
            pass

    def end(self) -> None:
        """Hand over what is left, and say that nothing follows."""
        self.over = [True] * len(self.over)
        while self._put():
            pass
        if self.streamer is not None:
            self.streamer.end()

    @property
    def finished(self) -> bool:
        """Return whether every text has ended, by itself or by criteria."""
        rows = zip(self.waiting, self.over, self.done, strict=True)
        return all(done or (over and not ids) for ids, over, done in rows)

    def _ready(self, row: int) -> bool:
        return bool(self.waiting[row]) or self.over[row] or (self.padded and self.done[row])

    def _put(self) -> bool:
        """Hand over the next place; return whether there was one."""
        if self.finished:
            return False
        column = [ids.popleft() if ids else self.pad for ids in self.waiting]
        if self.padded:
            pairs = zip(column, self.done, strict=True)
            column = [self.pad if done else token for token, done in pairs]
        if self.criteria:
            self.ids = torch.cat([self.ids, self.ids.new_tensor(column)[:, None]], 1)
            done = torch.tensor(self.done, device=self.ids.device)
            for criterion in self.criteria:
                done = done | criterion(self.ids.clone(), None)
            self.done = done.tolist()
        if self.streamer is not None:
            self.streamer.put(torch.tensor(column, device="cpu"))
        return True
