"""The token ids of a batch of texts in memory taken once, and what two models mean by an id."""

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from cactus_theory.decoding.models import text_config

# ids of a text and how many of them are its prompt's → whether the text ends here
Stop = Callable[[Int[Tensor, "1 length"], int], bool]


class Texts:
    """Prompts and generated ids, each row from its own position 0: (B, longest + room).

    ``lengths`` are settled tokens, which drafted ones follow; ``ids`` the same as lists, prompt
    included; ``prompt_lengths`` those of the prompts. ``stop`` is called after every token of a
    row, in addition to the end-of-text ids. ``capacity`` are the most positions of a row, ``last``
    the last place of its memory: ``beside`` more, for drafted tokens of the same position.
    ``given`` are the prompts with what is hidden from models; ``numbers`` those of the rows still
    open in the batch that was given.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        eos: frozenset[int],
        device: torch.device,
        beside: int = 0,
        given: Int[Tensor, "batch length"] | None = None,
    ) -> None:
        self.ids = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.limits = [length + room for length in self.prompt_lengths]
        self.lengths = list(self.prompt_lengths)
        self.ended = [False] * len(prompts)
        self.given, self.numbers = given, list(range(len(prompts)))
        self.eos, self.device = eos, device
        self.stop: Stop | None = None
        self.capacity = max(self.limits)
        # one spare place takes what is drafted in a full row while other rows still draft
        self.last = self.capacity + beside
        rows = [ids + [0] * (self.last + 1 - len(ids)) for ids in self.ids]
        self.buffer = torch.tensor(rows, dtype=torch.int64, device=device)

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def open(self) -> bool:
        return any(self.room(row) for row in range(self.batch))

    def keep(self, rows: Sequence[int]) -> None:
        for name in ("ids", "prompt_lengths", "limits", "lengths", "ended", "numbers"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])
        self.buffer[: len(rows)] = self.buffer[list(rows)]
        self.buffer = self.buffer[: len(rows)]

    def room(self, row: int) -> int:
        """Return the number of tokens a row may still get; 0 once its text has ended."""
        return 0 if self.ended[row] else self.limits[row] - self.lengths[row]

    def new_ids(self, row: int) -> list[int]:
        return self.ids[row][self.prompt_lengths[row] :]

    def take(self, starts: Sequence[int], counts: Sequence[int]) -> Int[Tensor, "batch most"]:
        """Return ``counts[b]`` ids from position ``starts[b]`` on, drafted ones included.

        Shorter rows are padded with arbitrary ids.
        """
        longest = max(counts)
        if self.batch == 1:
            return self.buffer[:, starts[0] : starts[0] + longest]
        at = torch.tensor(starts, device=self.device)[:, None]
        at = (at + torch.arange(longest, device=self.device)).clamp(max=self.last)
        return self.buffer.gather(1, at)

    def propose(self, offset: int, token: Int[Tensor, "batch"]) -> None:
        """Write drafted token number ``offset`` of every row after its settled ones."""
        self._write([length + offset for length in self.lengths], token)

    def propose_all(self, token_ids: Int[Tensor, "batch K"]) -> None:
        at = torch.tensor(self.lengths, device=self.device)[:, None]
        at = at + torch.arange(token_ids.shape[1], device=self.device)
        self.buffer.scatter_(1, at.clamp_(max=self.last), token_ids)

    def prefix(self, row: int, drafted: int) -> Int[Tensor, "1 length"]:
        return self.buffer[row : row + 1, : self.lengths[row] + drafted]

    def shown(self, row: int, ids: Int[Tensor, "1 length"]) -> Int[Tensor, "1 shown"]:
        """Return ids of a row after its prompt as it was given, as ``generate`` shows them."""
        if self.given is None:
            return ids
        prompt = self.given[self.numbers[row]][None]
        return torch.cat([prompt, ids[:, self.prompt_lengths[row] :]], 1)

    def path_ids(self, row: int, path: Sequence[int]) -> Int[Tensor, "1 length"]:
        """Return a row's settled ids and some of its drafted ones, in the order of ``path``."""
        length = self.lengths[row]
        return self.buffer[row : row + 1, [*range(length), *(length + place for place in path)]]

    def settle(self, emitted: Sequence[Sequence[int]], last: Int[Tensor, "batch"]) -> list[int]:
        """Append ids to every row, up to its first end; return how many each row took.

        ``last`` (B,) is the last id of each row, on the device; those before it were drafted
        and stand in the buffer already.
        """
        lengths = zip(self.lengths, emitted, strict=True)
        self._write([length + len(ids) - 1 for length, ids in lengths], last)
        return [self.append(row, ids) for row, ids in enumerate(emitted)]

    def append(self, row: int, ids: Sequence[int]) -> int:
        """Append ids that stand in the buffer to a row, up to its end; return how many."""
        for count, token in enumerate(ids, 1):
            self.ids[row].append(token)
            self.lengths[row] += 1
            stop, start = self.stop, self.prompt_lengths[row]
            stopped = stop is not None and stop(self.prefix(row, 0).clone(), start)
            self.ended[row] = stopped or token in self.eos
            if self.ended[row]:
                return count
        return len(ids)

    def _write(self, at: Sequence[int], token: Int[Tensor, "batch"]) -> None:
        if self.batch == 1:
            self.buffer.select(1, at[0]).copy_(token)
            return
        places = torch.tensor(at, device=self.device).clamp(max=self.last)
        self.buffer[torch.arange(self.batch, device=self.device), places] = token


def left_padded(prompts: Sequence[Sequence[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask (B, longest) of prompts set against the right edge."""
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=model.device), torch.tensor(marks, device=model.device)


def completion(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ``ids`` add to a prompt, without special tokens.

    That is the text of all ids without that of the prompt, as the first token of a text may lose
    its blank, and others may be written otherwise at the start.
    """
    texts = [*prompt_ids], [*prompt_ids, *ids]
    before, whole = (tokenizer.decode(text, skip_special_tokens=True) for text in texts)
    return whole[len(commonprefix([before, whole])) :]


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError unless both tokenizers map the same texts to the same ids.

    Compares the maps of ``get_vocab()``, token by token in order of id; equal sizes prove
    nothing. The message names the first token that differs.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return
    ids = {**draft, **target}
    for token in sorted(ids, key=lambda text: (ids[text], text)):
        if target.get(token) != draft.get(token):
            raise ValueError(
                "draft_tokenizer: its token map must equal that of target_tokenizer; "
                f"token {token!r} is {_named(target.get(token))} in the target "
                f"and {_named(draft.get(token))} in the draft"
            )


def check_model_vocabularies(target_model: Any, draft_model: Any) -> None:
    """Raise ValueError for sizes that padding of one vocabulary cannot explain."""
    sizes = [text_config(model).vocab_size for model in (target_model, draft_model)]
    if max(sizes) >= 2 * min(sizes):
        raise ValueError(
            f"draft_model: vocabulary must be that of target_model ({sizes[0]} tokens), up to "
            f"padding; got {sizes[1]}"
        )


def fitted(logits: Tensor, size: int) -> Tensor:
    """Return logits of ``size`` tokens: those beyond are cut, missing ones are −∞."""
    missing = size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :size].contiguous() if missing else logits


def _named(index: int | None) -> str:
    return "missing" if index is None else f"id {index}"
