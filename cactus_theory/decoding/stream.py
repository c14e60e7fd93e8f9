"""Text as it is verified: pieces of it, and ids for the library's streamers."""

from collections import deque
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch


class TextPieces:
    """Turns ids into text as they come; the pieces together are the text decoded at once.

    Held back until more is known: characters of which a byte is missing, and a space at the
    end, which some tokenizers take away before a full stop.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.prompt_ids = tokenizer, prompt_ids
        self.ids: list[int] = []
        self.shown = ""

    def add(self, new: Sequence[int]) -> str:
        """Return the text that can be shown once the ids ``new`` are known, perhaps none."""
        self.ids.extend(new)
        text = self._text()
        settled = text.rstrip(" ")
        if settled.endswith("\ufffd") or not settled.startswith(self.shown):
            return ""
        return self._show(settled)

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._show(self._text())

    def _show(self, text: str) -> str:
        piece, self.shown = text[len(self.shown) :], text
        return piece

    def _text(self) -> str:
        return completion(self.tokenizer, self.prompt_ids, self.ids)


def completion(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ``ids`` add to a prompt, without special tokens.

    That is the text of all ids without that of the prompt, as the first token of a text may lose
    its blank, and others may be written otherwise at the start.
    """
    texts = [*prompt_ids], [*prompt_ids, *ids]
    before, whole = (tokenizer.decode(text, skip_special_tokens=True) for text in texts)
    return whole[len(commonprefix([before, whole])) :]


class Columns:
    """Hands ids to a streamer as the library's own ``generate`` does: (B,) for every new place.

    Rows advance at their own pace, so a place waits for the slowest open row; a text that has
    ended is padded with ``pad``.
    """

    def __init__(self, streamer: Any, batch: int, pad: int) -> None:
        self.streamer, self.pad = streamer, pad
        self.waiting: list[deque[int]] = [deque() for _ in range(batch)]
        self.over = [False] * batch

    def add(self, new: Sequence[Sequence[int]]) -> None:
        """Take the ids of a round, those of each row; a row with none has ended."""
        for row, ids in enumerate(new):
            self.waiting[row].extend(ids)
            self.over[row] |= not ids
        while all(map(lambda ids, over: ids or over, self.waiting, self.over)) and self._put():
            pass

    def end(self) -> None:
        """Hand over what is left, and say that nothing follows."""
        while self._put():
            pass
        self.streamer.end()

    def _put(self) -> bool:
        """Hand over the next place; return whether there was one."""
        if not any(self.waiting):
            return False
        column = [ids.popleft() if ids else self.pad for ids in self.waiting]
        self.streamer.put(torch.tensor(column))
        return True
