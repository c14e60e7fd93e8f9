"""Sample texts from a target with its hidden states, in pieces on disk, and batch them.

``train-head`` trains on the states, ``train-pair`` on the texts alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from cactus_theory.base.prompts import Prompt, Rendering
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding.models.model_with_cache import CachedModel
from cactus_theory.verify.draw import pick

from ..common.results import write_tensors
from .eagle3 import Batch

# texts are sorted by length within this many batches, so that padding wastes little
SORTED = 16
# ended texts are dropped from a batch once they are this share of it
ENDED = 0.1
# temperature and top-k of a user's turn: from the whole law, most turns would be no questions
USERS_TEMPERATURE, USERS_TOP = 0.9, 50


@dataclass(frozen=True)
class Turn:
    """A turn that the target writes: at most ``most`` tokens, until one of ``ends``.

    Tokens are drawn at temperature 1, or from the ``top`` likeliest at USERS_TEMPERATURE. Then the
    ids ``after`` are appended, without the first if the target wrote it.
    """

    most: int
    ends: frozenset[int]
    top: int | None = None
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """T texts, one after another: ids (N,), lengths (T,), states of R layers (N, R, H).

    ``norms`` (N,) is the logsumexp of the logits after a token if the next token was drawn from all
    tokens at temperature 1, else NaN: only rows with a norm count in training.
    """

    ids: Int[Tensor, "N"]
    lengths: Int[Tensor, "T"]
    states: Float[Tensor, "N reads hidden"]
    norms: Float[Tensor, "N"]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the piece in a file, memory-mapped, so that only the used parts are read."""
        return cls(**torch.load(path, weights_only=True, mmap=True))

    def turned(self, after: Sequence[int]) -> list[list[int]]:
        """Return the ids of each text followed by ``after``, which closes the turn."""
        texts = [ids.tolist() for ids in self.ids.split(self.lengths.tolist())]
        return [ids + [*after][ids[-1:] == [*after[:1]] :] for ids in texts]


@dataclass(frozen=True)
class Source:
    """Beginnings of texts, from which the seed picks at random, and the turns that follow."""

    beginnings: Sequence[Sequence[int]]
    turns: Sequence[Turn]

    def pieces(
        self, target: Any, folder: Path, count: int, texts: int, reads: Sequence[int], seed: int
    ) -> list[Path]:
        """Return the files of ``count`` pieces of ``texts`` texts each; existing files are kept."""
        paths = [folder / f"{number:04d}.pt" for number in range(count)]
        progress = Progress(f"{folder.name}: pieces of {texts} texts", count)
        for number, path in enumerate(paths):
            if not path.exists():
                piece = self.piece(target, texts, reads, seed * 100_003 + number)
                write_tensors(path, vars(piece))
            progress.update(number + 1, "")
        return paths

    def piece(self, target: Any, texts: int, reads: Sequence[int], seed: int) -> Piece:
        """Return a piece of ``texts`` texts with randomly picked beginnings."""
        generator = Generator().manual_seed(seed)
        some = torch.randint(len(self.beginnings), (texts,), generator=generator)
        begun = [self.beginnings[at] for at in some.tolist()]
        for turn in self.turns[:-1]:
            begun = written(target, begun, turn, (), generator).turned(turn.after)
        return written(target, begun, self.turns[-1], reads, generator)


def own_prompts(tokenizer: Any, ends: frozenset[int], prompt: int, answer: int) -> Source:
    """Return a source in which the target writes both the user's turn and the answer.

    The chat template gives the ids around the turns. Raises ValueError for a tokenizer without a
    template, or with a template that changes the user's text.
    """
    mark = "\x00user\x00"
    text = Rendering(chat=True).text(Prompt(mark), tokenizer)
    opening, found, closing = text.partition(mark)
    if not found:
        raise ValueError("--prompts: must be given where the template changes a user's text")
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (opening, closing)
    )
    users = Turn(prompt, ends | {after[0]}, USERS_TOP, tuple(after))
    return Source([before], [users, Turn(answer, ends)])


def _next(logits: Tensor, turn: Turn, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each row's logits; return tokens and logsumexp (NaN with a top-k)."""
    scaled, ids = logits.float(), None
    if turn.top is not None:
        scaled, ids = scaled.div(USERS_TEMPERATURE).topk(turn.top)
    most = scaled.amax(-1, keepdim=True)
    weights = (scaled - most).exp_()
    tokens = pick(weights, coins.double())
    if ids is not None:
        return ids.gather(1, tokens[:, None])[:, 0], most[:, 0] * torch.nan
    return tokens, weights.sum(-1).log_().add_(most[:, 0])


@torch.inference_mode()
def written(
    target: Any, begun: Sequence[Sequence[int]], turn: Turn, reads: Sequence[int], source: Generator
) -> Piece:
    """Sample a turn after each text; return the texts with the states of their tokens.

    The last token of a text was not fed to the target: its states are zeros.
    """
    texts, left = [list(ids) for ids in begun], [turn.most] * len(begun)
    norms = [[torch.nan] * len(ids) for ids in texts]
    model = CachedModel(target, max(map(len, texts)) + turn.most, len(texts), reads=tuple(reads))
    states = [torch.empty(0)] * len(texts)
    rows, counts = list(range(len(texts))), [len(ids) for ids in texts]
    fed = pad_sequence([torch.tensor(ids) for ids in texts], batch_first=True)
    while rows:
        logits = model.feed(fed, counts, [1] * len(counts))[:, 0]
        coins = torch.rand(len(texts), generator=source)[rows]
        tokens, sums = (own.tolist() for own in _next(logits, turn, coins))
        for row, token, norm in zip(rows, tokens, sums, strict=True):
            if left[row]:
                norms[row][-1:] = [norm, torch.nan]
                texts[row].append(token)
                left[row] = 0 if token in turn.ends else left[row] - 1
        ended = [place for place, row in enumerate(rows) if not left[row]]
        if len(ended) > ENDED * len(rows) or len(ended) == len(rows):
            for place in ended:
                states[rows[place]] = _states(model, place, len(texts[rows[place]]))
            kept = [place for place, row in enumerate(rows) if left[row]]
            model.keep(kept)
            rows = [rows[place] for place in kept]
        counts = [int(left[row] > 0) for row in rows]
        fed = torch.tensor([texts[row][-1:] for row in rows])
    ids = [torch.tensor(own) for own in texts]
    every = torch.tensor([norm for own in norms for norm in own])
    return Piece(torch.cat(ids), torch.tensor([*map(len, ids)]), torch.cat(states), every)


def _states(model: CachedModel, row: int, length: int) -> Float[Tensor, "length reads hidden"]:
    layers = [model.cache.hidden[layer] for layer in model.cache.hidden]
    kept = [layer[row, : length - 1] for layer in layers if layer is not None]
    states = torch.stack(kept, 1) if kept else torch.empty(length - 1, 0, 0)
    return torch.cat([states, states.new_zeros(1, *states.shape[1:])])


@dataclass(frozen=True)
class SampledTexts:
    """The texts of several pieces, read from their files when a batch needs them."""

    paths: Sequence[Path]
    embedding: Float[Tensor, "vocab hidden"]

    @cached_property
    def pieces(self) -> list[Piece]:
        return [Piece.read(path) for path in self.paths]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Return (piece, first token, length) of every text with at least one row that counts."""
        found = []
        for number, piece in enumerate(self.pieces):
            ends = piece.lengths.cumsum(0)
            for end, length in zip(ends.tolist(), piece.lengths.tolist(), strict=True):
                if not piece.norms[end - length + 1 : end - 1].isnan().all():
                    found.append((number, end - length, length))
        return found

    @cached_property
    def rows(self) -> int:
        """Return the mean number of rows that count per text, at least 1."""
        count = sum(int((~piece.norms.isnan()).sum()) for piece in self.pieces)
        return max(round(count / max(len(self.places), 1)), 1)

    def batch(
        self, numbers: Sequence[int], most: int | None = None, source: Generator | None = None
    ) -> Batch:
        """Return a batch of some texts, padded with units that do not count.

        At most ``most`` units of a text are anchors, picked at random by ``source``.
        """
        texts = [self._text(*self.places[number]) for number in numbers]
        embedded, states, rows, norms = (
            pad_sequence([*parts], batch_first=True, padding_value=value)
            for parts, value in zip(zip(*texts, strict=True), (0, 0, 0, torch.nan), strict=True)
        )
        counts = ~norms.isnan()
        likely = counts.double()
        if source is not None:
            likely *= 1 + torch.rand(counts.shape, generator=source, dtype=torch.float64)
        size = min(most or counts.shape[1], int(counts.sum(1).max()))
        anchors = likely.sort(dim=1, descending=True, stable=True).indices[:, :size]
        real = counts.gather(1, anchors)
        return Batch(embedded, states, rows, norms.nan_to_num(), counts, anchors, real)

    def _text(self, number: int, start: int, length: int) -> tuple[Tensor, ...]:
        piece, end = self.pieces[number], start + length - 1
        embedded = self.embedding[piece.ids[start + 1 : end].long()]
        states = piece.states[start:end]
        return embedded, states[:-1, :-1].flatten(1), states[1:, -1], piece.norms[start + 1 : end]

    def shuffled(self, size: int, most: int, seed: int) -> Callable[[int, Generator], Batch]:
        """Return a function from the training step to a batch; an epoch has each text about once.

        Texts are sorted by length within ``SORTED`` batches, so that padding wastes little.
        """
        count = len(self.places)
        steps = max(count // size, 1)

        def batch(step: int, source: Generator) -> Batch:
            epoch, at = divmod(step, steps)
            shuffle = Generator().manual_seed(seed * 100_003 + epoch)
            order = torch.randperm(count, generator=shuffle).tolist()
            parts = (order[i : i + SORTED * size] for i in range(0, count, SORTED * size))
            some = [n for part in parts for n in sorted(part, key=lambda n: self.places[n][2])]
            first = int(torch.randperm(steps, generator=shuffle)[at]) * size
            return self.batch(some[first : first + size], most, source)

        return batch
