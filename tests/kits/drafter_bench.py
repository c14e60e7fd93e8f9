"""Drafters at work on made-up texts: drafts as proposed, and rounds decoded with chosen coins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.copies import copied
from cactus_theory.decoding.drafters import DraftContext, Drafter, Drafting
from cactus_theory.decoding.host_rounds import HostRounds
from cactus_theory.decoding.models import CachedModel, text_config
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.prepare import Opening
from cactus_theory.decoding.probabilities import Warp
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.decoding.text import Texts
from cactus_theory.policies import Policy
from cactus_theory.testing.definition import Bounds, Seen
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier

# tokens of the made-up prompts: in the third and the last an n-gram drafter finds something
PROMPTS = ((1, 5, 9), (2,), (3, 3, 7, 3, 3, 7, 3), (8, 4, 8, 1, 8, 4))
# number of likeliest drafted tokens, and of likeliest tokens after each, that are checked
MOST = 16
# least probability of a checked token: models round differently in other batches
THIN = 1e-3
# number of rows also decoded as a batch of one, whose coins lie elsewhere
SINGLY = 4
# logits taken off a token that its text holds already
PENALTY = 1.5


@dataclass(frozen=True)
class RecordedDraft:
    """A draft as it was proposed: copies, as a drafter may go on using its memory."""

    before: list[list[int]]  # the texts
    most: list[int]  # most tokens of a path, by text
    draft: Draft
    written: Tensor  # (B, K) tokens that the drafter has written into the texts
    coins: Tensor  # (B, most)

    @property
    def drawn(self) -> list[list[int]]:
        """Return the places of each row's tokens that were drawn, in order."""
        if self.draft.probs is None:
            return [[] for _ in self.draft.lengths]
        flags = self.drafted if self.draft.sampled is None else self.drafted & self.draft.sampled
        return [row.nonzero()[:, 0].tolist() for row in flags]

    @property
    def drafted(self) -> Tensor:
        places = torch.arange(self.draft.token_ids.shape[1])
        return places < torch.tensor(self.draft.lengths)[:, None]


@dataclass
class Bench(Seen):
    """A drafter on made-up prompts, and the verifier and policy beside it."""

    drafter: Drafter
    target_model: Any
    model: Any
    verifier: Verifier
    policy: Policy
    temperature: float
    most: int
    rounds: int
    seed: int

    @cached_property
    def vocab(self) -> int:
        return text_config(self.target_model).vocab_size

    @property
    def prompts(self) -> list[list[int]]:
        return [[token % self.vocab for token in prompt] for prompt in PROMPTS]

    def accepting(self, depth: int) -> int:
        """Return how many acceptance coins a draft takes whose paths have so many tokens."""
        return self.verifier.coins(self.drafter.nodes(depth))

    def source(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def coins(self, source: torch.Generator) -> Tensor:
        shape = len(self.prompts), self.most
        return torch.rand(shape, generator=source, dtype=torch.float64)

    def begin(self) -> tuple[Texts, Drafting]:
        room = (self.most + 1) * (self.rounds + 1)
        beside = self.drafter.nodes(self.most) - self.most
        texts = Texts(self.prompts, room, frozenset(), torch.device("cpu"), beside)
        warp = Warp(self.temperature)
        features = None
        if reads := self.reads:
            target = CachedModel(self.target_model, texts.capacity, texts.batch, reads=reads)
            features = _Fed(target, texts)
        clock = Stopwatch()
        setting = DraftContext(self.target_model, texts, warp, clock, self.most, features=features)
        return texts, self.drafter.begin(setting)

    @property
    def reads(self) -> Sequence[int]:
        return self.drafter.reads(self.target_model)

    def row_after(self, text: list[int], processed: bool = False) -> Float[Tensor, "1 vocab"]:
        ids = torch.tensor([text])
        logits = self.target_model(input_ids=ids, use_cache=False).logits[:, -1].double()
        return ((lowered(ids, logits) if processed else logits) / self.temperature).softmax(-1)

    def anew(self, coins: Tensor) -> RecordedDraft:
        return _proposed(*self.begin(), [self.most] * len(self.prompts), coins.clone())

    @cached_property
    def turns(self) -> list[RecordedDraft]:
        """Return the drafts of texts that go on unequally."""
        (texts, drafting), source, drafts = self.begin(), self.source(), []
        for turn in range(self.rounds):
            lengths = [self.most - (row + turn) % min(3, self.most) for row in range(texts.batch)]
            one = _proposed(texts, drafting, lengths, self.coins(source))
            last = torch.randint(0, self.vocab, (texts.batch,), generator=source)
            # each row goes on with some of its draft, and one more token
            taken = [min((turn + row) % 4, own) for row, own in enumerate(one.draft.lengths)]
            ids = zip(one.draft.token_ids.tolist(), taken, last.tolist(), strict=True)
            texts.settle([[*own[:count], more] for own, count, more in ids], last)
            drafting.settle()
            drafts.append(one)
        return drafts


def lowered(ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores, less PENALTY for every token that its text holds already."""
    return scores.scatter_add(1, ids, torch.full_like(scores, -PENALTY).gather(1, ids))


class _Fed:
    """The states of settled texts without their last tokens, computed on first use."""

    def __init__(self, target: CachedModel, texts: Texts) -> None:
        self.target, self.texts, self.hidden = target, texts, target.hidden

    @property
    def lengths(self) -> Sequence[int]:
        _feed(self.target, self.texts)
        return self.target.lengths


def _feed(target: CachedModel, texts: Texts) -> None:
    counts = [own - 1 - fed for own, fed in zip(texts.lengths, target.lengths, strict=True)]
    if any(counts):
        target.feed(texts.take(target.lengths, counts), counts, [1] * len(counts))


def _proposed(texts: Texts, drafting: Drafting, lengths: list[int], coins: Tensor) -> RecordedDraft:
    before = [list(text.ids) for text in texts.rows]
    draft = copied(drafting.propose(lengths, coins))
    place = torch.tensor(texts.lengths)[:, None] + torch.arange(draft.token_ids.shape[1])
    written = texts.buffer.gather(1, place.clamp(max=texts.buffer.shape[1] - 1))
    return RecordedDraft(before, lengths, draft, written, coins)


def stream(numbers: Float[Tensor, "count"]) -> Callable[[int], Tensor]:
    left = [numbers]

    def take(count: int) -> Float[Tensor, "count"]:
        taken, left[0] = left[0][:count], left[0][count:]
        return taken

    return take


class WatchedVerifier(Verifier):
    """A verifier that records the rows and drafts that it is given."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.name = verifier, verifier.name  # type: ignore[misc]
        self.drafts, self.draws = verifier.drafts, verifier.draws  # type: ignore[misc, assignment]
        self.q: Tensor | None = None
        self.draft: Draft | None = None

    def coins(self, drafted: int) -> int:
        return self.verifier.coins(drafted)

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch *draws"],
    ) -> Verdict:
        self.q, self.draft = target_probs.clone(), copied(draft)
        return self.verifier.verify(assigned, target_probs, draft, accept, draw)


def decoded(
    bench: Bench,
    prompt: list[int],
    numbers: list[list[float]],
    depth: int = 1,
    processors: Sequence[Any] = (),
) -> tuple[list[list[int]], WatchedVerifier]:
    watching = WatchedVerifier(bench.verifier)
    options = DecodeOptions(
        policy=bench.policy,
        num_draft_tokens=depth,
        max_new_tokens=depth + 1,
        temperature=bench.temperature,
        logits_processor=processors,
        verifier=watching,
        meter=False,
    )
    ids = torch.tensor([prompt] * len(numbers))
    opening = Opening(bench.target_model, bench.drafter, ids, options)
    for text, row in zip(opening.texts.rows, numbers, strict=True):
        text.stream = stream(torch.tensor(row, dtype=torch.float64))
    rounds = HostRounds(opening)
    if bench.reads:  # as if a round had been there before
        _feed(rounds.target, rounds.texts)
    return rounds.round(), watching


def compared(
    bench: Bench, prompt: list[int], due: list[list[int]], numbers: list[list[float]]
) -> Iterator[Bounds]:
    """Yield whether the coins give the expected tokens, in one batch and row by row."""
    each = range(0, len(due), max(1, len(due) // SINGLY))
    for rows in (slice(None), *(slice(at, at + 1) for at in each)):
        texts, _ = decoded(bench, prompt, numbers[rows])
        for text, expected, coins in zip(texts, due[rows], numbers[rows], strict=True):
            about = (
                "coins: what is drafted, what is accepted and what follows must have numbers of "
                f"their own; with {coins} for the three, {expected} is due and {text} was "
                "emitted: whether these differ"
            )
            yield Bounds(torch.tensor([text != expected]), 0, 0, about, 0.0)


def middles(row: Float[Tensor, "vocab"]) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a row, each with the coin in the middle of its share."""
    row = row.double() / row.double().sum()
    middle = row.cumsum(-1) - row / 2
    best = row.topk(min(MOST, len(row))).indices
    return [(int(token), float(middle[token])) for token in best if row[token] > THIN]
