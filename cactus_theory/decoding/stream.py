"""Text as it is verified: pieces of it for a loop, and ids for the library's streamers."""

from collections import deque
from collections.abc import Iterator, Sequence
from queue import Queue
from threading import Thread
from typing import Any

import torch

from cactus_theory.base.arguments import whole_number


class TextPieces:
    """Turns ids into text as they come; the pieces together are the text decoded at once.

    Held back until more is known: characters of which a byte is missing, and a space at the
    end, which some tokenizers take away before a full stop.
    """

    def __init__(self, tokenizer: Any, **decoding: Any) -> None:
        self.tokenizer, self.decoding = tokenizer, {"skip_special_tokens": True} | decoding
        self.ids: list[int] = []
        self.shown = ""

    def add(self, new: Sequence[int]) -> str:
        """Return what can be shown now that the ids ``new`` are known, perhaps nothing."""
        self.ids.extend(new)
        text = self._text()
        settled = text.rstrip(" ")
        if settled.endswith("\ufffd") or not settled.startswith(self.shown):
            return ""
        return self._show(settled)

    def rest(self) -> str:
        """Return what was held back."""
        return self._show(self._text())

    def _show(self, text: str) -> str:
        piece, self.shown = text[len(self.shown) :], text
        return piece

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, **self.decoding)


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


class SpeculativeStream:
    """Pieces of the text of one prompt while it is decoded; iterate over it once.

    Attributes
    ----------
    output : what ``model.generate`` returned, None before the end.
    """

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self.model, self.options, self.tokenizer = model, options, tokenizer
        self.output: Any = None
        self.failure: BaseException | None = None
        self.abandoned = False
        self.queue: Queue[list[int] | None] = Queue()

    def __iter__(self) -> Iterator[str]:
        pieces = TextPieces(self.tokenizer)
        for new in self._rounds():
            if piece := pieces.add(new):
                yield piece
        if piece := pieces.rest():
            yield piece

    def _rounds(self) -> Iterator[list[int]]:
        """Decode in a thread; give every round's new ids."""
        thread = Thread(target=self._decode, daemon=True)
        thread.start()
        try:
            while (new := self.queue.get()) is not None:
                yield new
            if self.failure is not None:
                raise self.failure
        finally:
            self.abandoned = True
            thread.join()

    def _decode(self) -> None:
        from cactus_theory.decoding.hugging_face import speculative_generate
        from cactus_theory.decoding.options import Callbacks

        try:
            ours = {
                "custom_generate": speculative_generate,
                "callbacks": Callbacks(on_tokens=self._take),
            }
            given = {"text_tokenizer": self.tokenizer} | self.options
            self.output = self.model.generate(**given, **ours)
        except _Abandoned:
            pass
        except BaseException as failure:  # raised again where the text is read
            self.failure = failure
        finally:
            self.queue.put(None)

    def _take(self, new: list[int]) -> None:
        if self.abandoned:
            raise _Abandoned
        self.queue.put(new)


class _Abandoned(Exception):
    """Nobody reads the text any more."""


def speculative_stream(model: Any, tokenizer: Any, **options: Any) -> SpeculativeStream:
    """Decode one prompt speculatively, and give its text piece by piece, one or none a round.

    ``for piece in speculative_stream(target, tokenizer, **inputs, draft_model=draft,
    policy="band:price=1", max_new_tokens=64): print(piece, end="", flush=True)``. The decode
    runs in a thread beside the loop and ends within a round after the loop is left. The pieces
    together are ``tokenizer.decode(new_ids, skip_special_tokens=True)``.

    Parameters
    ----------
    model, tokenizer : the target and its tokenizer.
    options : those of ``model.generate``, and of :func:`speculative_generate`.

    Returns
    -------
    SpeculativeStream, whose ``output`` is what ``generate`` returned, once the text is read.

    Raises
    ------
    ValueError
        More than one prompt, ``callbacks`` among the options. What the decode raises is raised
        by the loop.

    Examples
    --------
    >>> inputs = pair.tokenizer("def f(", return_tensors="pt")
    >>> options = {"draft_model": pair.draft, "policy": "band:price=1", "max_new_tokens": 8}
    >>> pieces = list(speculative_stream(pair.target, pair.tokenizer, **inputs, **options))
    >>> 0 < len(pieces) <= 8
    True
    """
    for name in ("inputs", "input_ids"):
        rows = getattr(options.get(name), "shape", (1,))[0]
        whole_number(name, rows, 1)
        if rows > 1:
            raise ValueError(f"{name}: must hold one prompt to be streamed; got {rows}")
    if (sequences := options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences: must be 1 to be streamed; got {sequences}")
    for name in ("callbacks", "custom_generate"):
        if name in options:
            raise ValueError(f"{name}: must not be given to a stream; got {options[name]!r}")
    return SpeculativeStream(model, tokenizer, options)
