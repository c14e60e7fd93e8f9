"""Texts that a target writes, in pieces on disk, with the hidden states that a head learns from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from cactus_theory.base.prompts import Prompt, Rendering
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding.models.model_with_cache import CachedModel

from ..common.results import write_tensors

# tokens of a vocabulary that are summed before one of them is drawn
BLOCK = 256
# share of a batch that has ended before its rows are left out
ENDED = 0.1
# how a target writes a user's turn: a few likely tokens, or turns are no questions
USERS_TEMPERATURE, USERS_TOP = 0.9, 50


@dataclass(frozen=True)
class Turn:
    """Tokens that the target writes in a row: at most ``most``, until one of ``ends``.

    Then ``after`` follows, whose first token is not repeated where the target wrote it.
    """

    most: int
    ends: frozenset[int]
    temperature: float = 1.0
    top: int | None = None
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Texts one after another: ids (N,), lengths (T,) and states of every read layer (N, R, H).

    ``norms`` (N,) are the logsumexp of the logits after a token, where the next one was drawn from
    all of them at temperature 1, and NaN elsewhere.
    """

    ids: Int[Tensor, "N"]
    lengths: Int[Tensor, "T"]
    states: Float[Tensor, "N reads hidden"]
    norms: Float[Tensor, "N"]

    def write(self, path: Path) -> None:
        """Write the piece, whole or not at all."""
        write_tensors(path, vars(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the piece in a file, of which is read what is used."""
        return cls(**torch.load(path, weights_only=True, mmap=True))


@dataclass(frozen=True)
class Source:
    """Beginnings of texts, of which the seed draws, and the turns that follow."""

    beginnings: Sequence[Sequence[int]]
    turns: Sequence[Turn]

    def pieces(
        self, target: Any, folder: Path, count: int, texts: int, reads: Sequence[int], seed: int
    ) -> list[Path]:
        """Return the files of ``count`` pieces of so many texts; those that are there are kept."""
        paths = [folder / f"{number:04d}.pt" for number in range(count)]
        with Progress(f"{folder.name}: pieces of {texts} texts", count) as progress:
            for number, path in enumerate(paths):
                if not path.exists():
                    self.piece(target, texts, reads, seed * 100_003 + number).write(path)
                progress.update(number + 1, "")
        return paths

    def piece(self, target: Any, texts: int, reads: Sequence[int], seed: int) -> Piece:
        """Return so many texts, whose beginnings are drawn."""
        generator = Generator().manual_seed(seed)
        some = torch.randint(len(self.beginnings), (texts,), generator=generator)
        begun = [self.beginnings[at] for at in some.tolist()]
        return written(target, begun, self.turns, reads, generator)


def own_prompts(tokenizer: Any, ends: frozenset[int], prompt: int, answer: int) -> Source:
    """Return texts of a target alone: it writes a user's turn, by its template, then the answer.

    ValueError for a tokenizer without a template, or with one that keeps no user's text.
    """
    mark = "\x00user\x00"
    rendering = Rendering(chat=True)
    opening, found, closing = rendering.text(Prompt(mark), tokenizer).partition(mark)
    if not found:
        raise ValueError("--prompts: must be given where the template changes a user's text")
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (opening, closing)
    )
    users = Turn(prompt, ends | {after[0]}, USERS_TEMPERATURE, USERS_TOP, tuple(after))
    return Source([before], [users, Turn(answer, ends)])


def drawn(weights: Float[Tensor, "rows vocab"], coins: Float[Tensor, "rows"]) -> Tensor:
    """Return the first token of each row whose cumulative weight exceeds its coin's share."""
    if spare := -weights.shape[1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, spare))
    parts = weights.view(len(weights), -1, BLOCK)
    sums = parts.sum(-1).cumsum(-1)
    share = coins[:, None] * sums[:, -1:]
    at = (sums <= share).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(at > 0, sums.gather(1, (at - 1).clamp(min=0)), 0)
    inner = parts[torch.arange(len(parts)), at[:, 0]].cumsum(-1)
    last = (inner < inner[:, -1:]).sum(-1)  # the last token of positive weight
    inside = torch.minimum((inner <= share - before).sum(-1), last)
    return at[:, 0] * BLOCK + inside


def _next(logits: Tensor, turn: Turn, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token drawn from each row's logits, and their logsumexp; NaN in other laws."""
    ids = None
    if turn.top is not None:
        logits, ids = logits.topk(turn.top)
    scaled = logits.float().div_(turn.temperature)
    most = scaled.amax(-1, keepdim=True)
    weights = scaled.sub_(most).exp_()
    tokens = drawn(weights, coins)
    if ids is not None:
        tokens = ids.gather(1, tokens[:, None])[:, 0]
    own = ids is None and turn.temperature == 1
    return tokens, weights.sum(-1).log_().add_(most[:, 0]) if own else most[:, 0] * torch.nan


class Writer:
    """The text of a row, its turns to come, tokens of the first one, those that must follow."""

    def __init__(self, ids: Sequence[int], turns: Sequence[Turn]) -> None:
        self.ids, self.turns, self.written = list(ids), list(turns), 0
        self.forced: list[int] = []
        self.norms = [torch.nan] * len(self.ids)

    @property
    def ended(self) -> bool:
        """Return whether nothing follows."""
        return not self.turns and not self.forced

    def add(self, token: int, norm: float) -> None:
        """Take a token drawn after a row of this norm, or the one that must stand there instead."""
        self.norms.append(torch.nan)
        if self.forced:
            self.ids.append(self.forced.pop(0))
            return
        turn = self.turns[0]
        self.ids.append(token)
        self.norms[-2] = norm
        self.written += 1
        closes = token in turn.ends
        if closes or self.written == turn.most:
            met = closes and turn.after[:1] == (token,)
            self.forced = list(turn.after[met:])
            self.turns.pop(0)
            self.written = 0


@torch.inference_mode()
def written(
    target: Any,
    beginnings: Sequence[Sequence[int]],
    turns: Sequence[Turn],
    reads: Sequence[int],
    generator: Generator,
) -> Piece:
    """Let a target go on with texts for some turns; keep the states of all their tokens.

    The last token of a text has none: its states are zeros.
    """
    writers = [Writer(ids, turns) for ids in beginnings]
    room = max(map(len, beginnings)) + sum(turn.most + len(turn.after) for turn in turns)
    model = CachedModel(target, room, len(writers), reads=tuple(reads))
    states: list[Tensor | None] = [None] * len(writers)
    rows = list(range(len(writers)))
    counts = [len(ids) for ids in beginnings]
    fed = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for row, ids in enumerate(beginnings):
        fed[row, : len(ids)] = torch.tensor(ids)
    while rows:
        logits = model.feed(fed, counts, [1] * len(counts))[:, 0]
        coins = torch.rand(len(writers), generator=generator)[rows]
        _extend([writers[row] for row in rows], logits, coins)
        ended = [place for place, row in enumerate(rows) if writers[row].ended]
        if len(ended) > ENDED * len(rows) or len(ended) == len(rows):
            for place in ended:
                states[rows[place]] = _states(model, place, len(writers[rows[place]].ids))
            kept = [place for place in range(len(rows)) if place not in set(ended)]
            model.keep(kept)
            rows = [rows[place] for place in kept]
        counts = [int(not writers[row].ended) for row in rows]
        fed = torch.tensor([writers[row].ids[-1:] for row in rows])
    ids = [id for writer in writers for id in writer.ids]
    lengths = torch.tensor([len(writer.ids) for writer in writers])
    kept = [own for own in states if own is not None]
    norms = torch.tensor([norm for writer in writers for norm in writer.norms])
    return Piece(torch.tensor(ids), lengths, torch.cat(kept), norms)


def _extend(writers: Sequence[Writer], logits: Tensor, coins: Tensor) -> None:
    """Give every row that goes on its next token."""
    tokens, norms = torch.zeros(len(writers), dtype=torch.int64), torch.zeros(len(writers))
    groups: dict[Turn, list[int]] = {}
    for place, writer in enumerate(writers):
        if not writer.ended and not writer.forced:
            groups.setdefault(writer.turns[0], []).append(place)
    for turn, places in groups.items():
        whole = len(places) == len(writers)
        rows = logits if whole else logits[places]
        tokens[places], norms[places] = _next(rows, turn, coins[places])
    for writer, token, norm in zip(writers, tokens.tolist(), norms.tolist(), strict=True):
        if not writer.ended:
            writer.add(token, norm)


def _states(model: CachedModel, row: int, length: int) -> Float[Tensor, "length reads hidden"]:
    """Return a row's states; those of its last token are zeros."""
    layers = [model.cache.hidden[layer] for layer in model.cache.hidden]
    kept = [layer[row, : length - 1] for layer in layers if layer is not None]
    states = torch.stack(kept, 1) if kept else torch.empty(length - 1, 0, 0)
    return torch.cat([states, states.new_zeros(1, *states.shape[1:])])
