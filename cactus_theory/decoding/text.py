"""The texts of a batch: a record for each text, one buffer for all ids, and vocabulary checks.

Decode loops, drafters and processors read the texts; only the loops append emitted tokens. The
*settled* tokens of a text are the prompt and the emitted tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.decoding.assignment import Rule
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.readings import Kind
from cactus_theory.decoding.schedule import Schedule, Spec

# (ids of a text, number of ids in the prompt) → whether the text ends here
Stop = Callable[[Int[Tensor, "1 length"], int], bool]


class Text:
    """The state of one text of a decode, on the host.

    Attributes
    ----------
    number : number of the text in the batch of prompts.
    ids : ids of the prompt and the emitted tokens.
    length : number of ids before the drafted tokens.
    prompt_length : number of ids in the prompt.
    limit : the most ids, prompt included.
    ended : whether an end-of-text token or ``stop`` has ended the text.
    rule : the policy or schedule of the text, with its state.
    stream : function that returns the next n coins of the text's random generator.
    rounds : (drafted, accepted, ended) → the number of such rounds; ``ended`` is whether the text
        ended before the last token of the round.
    """

    def __init__(
        self, number: int, prompt: Sequence[int], room: int, seed: int, rule: Rule
    ) -> None:
        self.number, self.ids, self.rule = number, list(prompt), rule
        self.length = self.prompt_length = len(prompt)
        self.limit, self.ended = self.length + room, False
        self.stream: Callable[[int], Any] = np.random.default_rng(seed).random
        self.rounds = Counter[Kind]()

    @property
    def room(self) -> int:
        """Return the number of tokens that the text may still get; 0 after its end."""
        return 0 if self.ended else self.limit - self.length

    @property
    def new_ids(self) -> list[int]:
        """Return the ids after the prompt."""
        return self.ids[self.prompt_length :]


class Texts:
    """The texts of a batch, and one buffer for their ids, (B, most ids of a text + ``beside`` + 1).

    In the buffer every text starts at position 0, without padding in front, and drafted tokens
    stand after the settled tokens. ``all`` are all texts; ``rows`` are the texts that are still in
    the batch, by row of the buffer. ``capacity`` is the most positions of a text. ``last`` is the
    last index of the buffer, ``capacity + beside``: ``beside`` indices are for nodes of trees that
    are not on a path. ``given`` are the prompts with padding, as the caller passed them; None
    without padding.

    ``room`` is the most new tokens of a text; ``eos`` are the end-of-text ids. ``policies`` has one
    entry for all texts or one per text. ``seeds`` is the seed of the first text (text b uses the
    seed plus b), or one seed per text. ``stop`` is called after every token of a text, in addition
    to the check of end-of-text ids.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        room: int,
        eos: frozenset[int],
        device: torch.device,
        beside: int = 0,
        given: Int[Tensor, "batch length"] | None = None,
        policies: Sequence[Spec | Schedule] = (defaults.POLICY,),
        seeds: int | Sequence[int] = 0,
        stop: Stop | None = None,
    ) -> None:
        batch, self.given, self.stop = len(prompts), given, stop
        self.eos, self.device = eos, device
        if len(policies) not in (1, batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({batch}); got {len(policies)}"
            )
        if isinstance(seeds, int):
            seeds = range(seeds, seeds + batch)
        if len(seeds) != batch:
            raise ValueError(f"seed: must be one per row of input_ids ({batch}); got {len(seeds)}")
        self.all: list[Text] = []
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            rule = Rule(policies[number % len(policies)], prompt)
            self.all.append(Text(number, prompt, room, seed, rule))
        self.rows = list(self.all)
        self.capacity = max(text.limit for text in self.all)
        # one spare index takes the ids that a full text drafts while other texts still draft
        self.last = self.capacity + beside
        rows = [text.ids + [0] * (self.last + 1 - text.length) for text in self.all]
        self.buffer = torch.tensor(rows, dtype=torch.int64, device=device)

    @property
    def batch(self) -> int:
        """Return the number of texts in the batch."""
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Return for each row the number of settled ids, which drafted tokens follow."""
        return [text.length for text in self.rows]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the texts of these rows, in this order; all other texts leave the batch."""
        self.rows = [self.rows[row] for row in rows]
        self.buffer[: len(rows)] = self.buffer[list(rows)]
        self.buffer = self.buffer[: len(rows)]

    def take(self, starts: Sequence[int], counts: Sequence[int]) -> Int[Tensor, "batch most"]:
        """Return ``counts[b]`` ids of row b from position ``starts[b]`` on, drafted ids included.

        Rows with fewer ids are padded with arbitrary ids.
        """
        longest = max(counts)
        if self.batch == 1:
            return self.buffer[:, starts[0] : starts[0] + longest]
        index = torch.tensor(starts, device=self.device)[:, None]
        index = (index + torch.arange(longest, device=self.device)).clamp(max=self.last)
        return self.buffer.gather(1, index)

    def propose(self, offset: int, token: Int[Tensor, "batch"]) -> None:
        """Write drafted token number ``offset`` of every row behind the settled tokens."""
        self._write([length + offset for length in self.lengths], token)

    def propose_all(self, token_ids: Int[Tensor, "batch K"]) -> None:
        """Write the drafted tokens (B, K) of every row behind the settled tokens."""
        at = torch.tensor(self.lengths, device=self.device)[:, None]
        at = at + torch.arange(token_ids.shape[1], device=self.device)
        self.buffer.scatter_(1, at.clamp_(max=self.last), token_ids)

    def prefix(self, row: int, drafted: int) -> Int[Tensor, "1 length"]:
        """Return a row's settled ids and the first ``drafted`` drafted ids, (1, length)."""
        return self.buffer[row : row + 1, : self.rows[row].length + drafted]

    def shown(self, row: int, ids: Int[Tensor, "1 length"]) -> Int[Tensor, "1 shown"]:
        """Return a row's ids with the padding of the prompt put back, as processors get them."""
        if self.given is None:
            return ids
        text = self.rows[row]
        return torch.cat([self.given[text.number][None], ids[:, text.prompt_length :]], 1)

    def path_ids(self, row: int, path: Sequence[int]) -> Int[Tensor, "1 length"]:
        """Return a row's settled ids followed by the drafted ids at the indices ``path``."""
        length = self.rows[row].length
        return self.buffer[row : row + 1, [*range(length), *(length + place for place in path)]]

    def settle(self, emitted: Sequence[Sequence[int]], last: Int[Tensor, "batch"]) -> list[int]:
        """Append the emitted ids to every row, up to an end of text; return the appended counts.

        ``last`` (B,) is the last emitted id of each row, on the device. The ids before were drafted
        and are in the buffer already.
        """
        lengths = zip(self.lengths, emitted, strict=True)
        self._write([length + len(ids) - 1 for length, ids in lengths], last)
        return [self.append(row, ids) for row, ids in enumerate(emitted)]

    def append(self, row: int, ids: Sequence[int]) -> int:
        """Append ids that are in the buffer to a row's text, up to its end; return their number."""
        text, stop = self.rows[row], self.stop
        for count, token in enumerate(ids, 1):
            text.ids.append(token)
            text.length += 1
            stopped = stop is not None and stop(self.prefix(row, 0).clone(), text.prompt_length)
            text.ended = stopped or token in self.eos
            if text.ended:
                return count
        return len(ids)

    def _write(self, at: Sequence[int], token: Int[Tensor, "batch"]) -> None:
        """Write ``token[b]`` into row b of the buffer at ``at[b]``, capped at the last index."""
        if self.batch == 1:
            self.buffer.select(1, at[0]).copy_(token)
            return
        places = torch.tensor(at, device=self.device).clamp(max=self.last)
        self.buffer[torch.arange(self.batch, device=self.device), places] = token


def left_padded(prompts: Sequence[Sequence[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask (B, longest) of prompts padded on the left."""
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=model.device), torch.tensor(marks, device=model.device)


def completion(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ``ids`` add to a prompt, without special tokens.

    Prompt and ids are decoded together, and the prompt's text is cut off: tokenizers may drop a
    blank or write a token differently at the start of a text.
    """
    texts = [*prompt_ids], [*prompt_ids, *ids]
    before, whole = (tokenizer.decode(text, skip_special_tokens=True) for text in texts)
    return whole[len(commonprefix([before, whole])) :]


def check_same_vocabulary(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError unless both tokenizers map the same texts to the same ids.

    The maps of ``get_vocab()`` are compared, as vocabularies of equal size may differ. The error
    names the first token, in order of id, that differs.
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
    """Raise ValueError if one vocabulary has at least twice the size of the other.

    Smaller differences may be padding of the same vocabulary, and are allowed.
    """
    sizes = [text_config(model).vocab_size for model in (target_model, draft_model)]
    if max(sizes) >= 2 * min(sizes):
        raise ValueError(
            f"draft_model: vocabulary must be that of target_model ({sizes[0]} tokens), up to "
            f"padding; got {sizes[1]}"
        )


def fitted(logits: Tensor, size: int) -> Tensor:
    """Return logits with ``size`` entries: further entries are cut, missing entries are −∞."""
    missing = size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :size].contiguous() if missing else logits


def _named(index: int | None) -> str:
    return "missing" if index is None else f"id {index}"
