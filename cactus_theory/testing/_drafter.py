"""Hold a drafter, and a round of decoding, to what acceptance relies on.

Its tokens are drawn from the rows that it reports, and every uniform number is used once. If the
token that replaces a refused one is drawn with the number that drew the refused one, or with the
one that refused it, every single row still looks right: only the joint law of what is drafted and
what is emitted is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._opening import Opening
from cactus_theory.decoding._sampling import Coins, Uniforms, Warp
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import Drafter, Drafting, Setting, as_drafter
from cactus_theory.decoding.host import Decode
from cactus_theory.decoding.models import CachedModel, text_config
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.testing._engine import broken
from cactus_theory.testing._property import Bounds, Properties, Seen
from cactus_theory.verify import Assignment, Draft, Verdict, Verifier, find_verifier
from cactus_theory.verify.draw import pick

DRAFTER_PROPERTIES = Properties("drafter_property")
# tokens of the made-up prompts: in the third and the last an n-gram drafter finds something
PROMPTS = ((1, 5, 9), (2,), (3, 3, 7, 3, 3, 7, 3), (8, 4, 8, 1, 8, 4))
# rows are float32, and sum to 1 up to its rounding
SUMS = 1e-4
# a model run with its cache and without, in float32
AGREES = 1e-4
# a coin this far inside a token's share cannot be mistaken for its neighbour's
INSIDE = 1e-6
# the likeliest drafted tokens, and of the tokens that follow each, that are looked at
MOST = 16
# shares thinner than this are left out: models round differently in other batches
THIN = 1e-3
# rows that are also decoded as a batch of one, which tosses its coins elsewhere
SINGLY = 4
# drafts of a batch whose numbers are counted
WANTED = (3, 1, 2)


def assert_drafter_properties(
    drafter: Any,
    target_model: Any,
    *,
    model: Any = None,
    verifier: str | Verifier = "chain",
    policy: str | Policy = "speculative",
    num_draft_tokens: int = 6,
    temperature: float = 0.8,
    rounds: int = 20,
    seed: int = 0,
) -> int:
    """Check a drafter with two small models; raise AssertionError with the first fault found.

    * Every drafted token is the one that its reported row and its coin give, also for coins
      just inside both ends of a token's share; rows sum to 1 and stand for what is written
      into the texts.
    * A draft without rows does not depend on the coins.
    * With ``model``, the rows are its own, softmax(logits / temperature), or certain.
    * In a round of decoding with ``verifier``, no uniform number is used twice: the token that
      follows a refused one does not depend on how that one was drawn.
    * In a tree (``verifier="tree"``) what is certain beside a drawn token is fixed before it is
      drawn, and the target's row at every node is that of its own text, under processors too.

    A drafter that samples from other rows than it reports breaks every acceptance rule, by so
    little that tests of frequencies may let it pass. Returns how many tokens were checked.

    Parameters
    ----------
    drafter : a Drafter, or a causal LM.
    target_model, model : Hugging Face causal LMs; small, as their rows are computed anew.
    verifier, policy : what the drafts are verified with.
    rounds : rounds of made-up texts, drafted with coins drawn with ``seed``.

    Raises
    ------
    AssertionError
        A property is broken.

    Examples
    --------
    >>> assert_drafter_properties(pair.draft, pair.target, model=pair.draft, rounds=1) > 0
    True
    """
    from cactus_theory.testing import _drafted_trees  # noqa: F401  enters its properties

    drafter, judge = as_drafter(drafter), find_verifier(verifier)
    given = drafter, target_model, model, judge, find_policy(policy)
    seen = Bench(*given, temperature, num_draft_tokens, rounds, seed)
    with torch.inference_mode():
        said = broken(type(drafter).__name__, [seen], DRAFTER_PROPERTIES.values())
    if said:
        raise AssertionError(said)
    return sum(sum(one.lengths) for one in seen.turns)


@dataclass(frozen=True)
class _Drafted:
    """A draft as it was proposed: copies, as a drafter may go on using its memory.

    Attributes
    ----------
    before : the texts. ``wanted`` : the most tokens of a path of each.
    written : (B, K) as the drafted tokens. ``coins`` : (B, most).
    """

    before: list[list[int]]
    wanted: list[int]
    draft: Draft
    written: Tensor
    coins: Tensor

    @property
    def lengths(self) -> list[int]:
        """Return how many tokens were drafted."""
        return self.draft.lengths

    @property
    def ids(self) -> Tensor:
        """Return the drafted tokens, (B, K)."""
        return self.draft.token_ids

    @property
    def probs(self) -> Tensor | None:
        """Return the rows by node, None where every token is certain."""
        return self.draft.probs

    @property
    def drawn(self) -> list[list[int]]:
        """Return the places of each row's tokens that were drawn, in order."""
        if self.probs is None:
            return [[] for _ in self.lengths]
        flags = self.own if self.draft.sampled is None else self.own & self.draft.sampled
        return [own.nonzero()[:, 0].tolist() for own in flags]

    @property
    def own(self) -> Tensor:
        """Return which tokens were drafted, (B, K) bool."""
        return torch.arange(self.ids.shape[1]) < torch.tensor(self.lengths)[:, None]


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
        """Return V."""
        return text_config(self.target_model).vocab_size

    @property
    def prompts(self) -> list[list[int]]:
        """Return the prompts, in the model's vocabulary."""
        return [[token % self.vocab for token in prompt] for prompt in PROMPTS]

    def accepting(self, depth: int) -> int:
        """Return how many acceptance coins a draft takes whose paths have so many tokens."""
        return self.verifier.coins(self.drafter.nodes(depth))

    def source(self) -> torch.Generator:
        """Return a generator begun anew."""
        return torch.Generator().manual_seed(self.seed)

    def coins(self, source: torch.Generator) -> Tensor:
        """Return coins for a draft of every prompt."""
        shape = len(self.prompts), self.most
        return torch.rand(shape, generator=source, dtype=torch.float64)

    def begin(self) -> tuple[Texts, Drafting]:
        """Return new texts and the drafter at work on them."""
        room = (self.most + 1) * (self.rounds + 1)
        beside = self.drafter.nodes(self.most) - self.most
        texts = Texts(self.prompts, room, frozenset(), torch.device("cpu"), beside)
        warp = Warp(self.temperature, (), [0] * len(self.prompts))
        features = None
        if self.reads:
            features = _Fed(
                CachedModel(self.target_model, texts.capacity, texts.batch, reads=self.reads), texts
            )
        clock = Stopwatch()
        setting = Setting(self.target_model, texts, warp, clock, self.most, features=features)
        return texts, self.drafter.begin(setting)

    @property
    def reads(self) -> Sequence[int]:
        """Return the layers whose states the drafter asks for."""
        return self.drafter.reads(self.target_model)

    def anew(self, coins: Tensor) -> _Drafted:
        """Return the first draft of new texts."""
        return _proposed(*self.begin(), [self.most] * len(self.prompts), coins.clone())

    @cached_property
    def turns(self) -> list[_Drafted]:
        """Return the drafts of texts that go on unequally."""
        (texts, drafting), source, found = self.begin(), self.source(), []
        for turn in range(self.rounds):
            wanted = [self.most - (row + turn) % min(3, self.most) for row in range(texts.batch)]
            one = _proposed(texts, drafting, wanted, self.coins(source))
            last = torch.randint(0, self.vocab, (texts.batch,), generator=source)
            texts.settle(list(_taken(one, turn, last.tolist())), last)
            drafting.settle()
            found.append(one)
        return found


class _Fed:
    """The states of settled texts but their last tokens, computed when somebody looks."""

    def __init__(self, target: CachedModel, texts: Texts) -> None:
        self.target, self.texts = target, texts

    @property
    def lengths(self) -> Sequence[int]:
        """Return how many tokens of each text have states."""
        _feed(self.target, self.texts)
        return self.target.lengths

    def hidden(
        self, layer: int, starts: Sequence[int], counts: Sequence[int]
    ) -> Float[Tensor, "batch most hidden"]:
        """Return copies of states."""
        return self.target.hidden(layer, starts, counts)


def _feed(target: CachedModel, texts: Texts) -> None:
    """Feed a target what it lacks of settled texts, but for their last tokens."""
    counts = [len(ids) - 1 - own for ids, own in zip(texts.ids, target.lengths, strict=True)]
    if any(counts):
        target.feed(texts.take(target.lengths, counts), counts, [1] * len(counts))


def _proposed(texts: Texts, drafting: Drafting, wanted: list[int], coins: Tensor) -> _Drafted:
    before = [list(ids) for ids in texts.ids]
    draft = copy_of(drafting.propose(wanted, coins))
    place = torch.tensor(texts.lengths)[:, None] + torch.arange(draft.token_ids.shape[1])
    written = texts.buffer.gather(1, place.clamp(max=texts.buffer.shape[1] - 1))
    return _Drafted(before, wanted, draft, written, coins)


def copy_of(draft: Draft) -> Draft:
    """Return a draft in memory of its own."""
    parts = {name: part.clone() for name, part in vars(draft).items() if isinstance(part, Tensor)}
    return replace(draft, **parts | {"counts": list(draft.lengths)})


def _taken(one: _Drafted, turn: int, last: Sequence[int]) -> Iterator[list[int]]:
    """Yield what each row goes on with: some of its draft, and one more token."""
    for row, (ids, count) in enumerate(zip(one.ids.tolist(), one.lengths, strict=True)):
        yield [*ids[: min((turn + row) % 4, count)], last[row]]


@DRAFTER_PROPERTIES.enter(hint="rows of another place, temperature or model than the draws")
def tokens_are_drawn_from_the_reported_rows(seen: Bench) -> Iterator[Bounds]:
    """Every drafted token is the one that its reported row and its coin give.

    Rows sum to 1, and stand for what is written into the texts.
    """
    for one in seen.turns:
        yield from _drawn(seen, one)


def _drawn(seen: Bench, one: _Drafted) -> Iterator[Bounds]:
    most, own = torch.tensor([seen.drafter.nodes(count) for count in one.wanted]), one.own
    yield Bounds(torch.tensor(one.lengths), None, most, "propose: must draft so many tokens", 0.0)
    if not bool(own.any()):
        return
    ids = one.ids[own]
    yield Bounds(one.written[own], ids, ids, "propose: must write its tokens into the texts", 0.0)
    drawn = [(row, *pair) for row, places in enumerate(one.drawn) for pair in enumerate(places)]
    if one.probs is None or not drawn:
        return

    def name(text: str) -> Callable[[tuple[int, ...]], str]:
        def about(index: tuple[int, ...]) -> str:
            row, number, place = drawn[index[0]]
            coin = float(one.coins[row, number])
            return f"propose: {text}; token {place} of {one.ids[row].tolist()}, coin {coin!r}"

        return about

    rows = torch.stack([one.probs[row, one.draft.node(row, place)] for row, _, place in drawn])
    must = "rows must be distributions"
    yield Bounds(rows, 0, None, name(must), 0.0)
    yield Bounds(rows.double().sum(-1), 1, 1, name(must), SUMS)
    due = pick(rows, torch.stack([one.coins[row, number] for row, number, _ in drawn]))
    ids = torch.stack([one.ids[row, place] for row, _, place in drawn])
    must = "tokens must be drawn from the reported rows, by their coins"
    yield Bounds(ids, due, due, name(must), 0.0)


@DRAFTER_PROPERTIES.enter(hint="another temperature, or a cache that is not rolled back")
def rows_are_the_models_own(seen: Bench) -> Iterator[Bounds]:
    """Rows are softmax(logits / temperature) of the model without a cache, or certain."""
    if seen.model is None:
        return
    for one in seen.turns:
        for row, places in enumerate(one.drawn):
            if one.probs is None or not places:
                continue
            path = one.draft.path(row, places[-1])  # what else was drawn lies on other paths
            text = torch.tensor([one.before[row] + one.ids[row, path].tolist()])
            logits = seen.model(input_ids=text, use_cache=False).logits[0, -len(path) - 1 : -1]
            due = (logits.double() / seen.temperature).softmax(-1)
            rows = one.probs[row, [one.draft.node(row, place) for place in path]].double()
            judged = (rows.amax(-1, keepdim=True) != 1.0).expand(rows.shape)
            apart = float(torch.where(judged, (rows - due).abs(), 0.0).amax())
            about = f"propose: rows must be the model's own after {one.before[row]}"
            about = f"{about}; they differ by {apart:.3g}, in row {{0}} at token {{1}}"
            yield Bounds(rows[None], due[None], due[None], about, AGREES, judged[None])


@DRAFTER_PROPERTIES.enter(hint="<= for <, or a running sum in another precision")
def borders_of_a_share_are_those_of_its_row(seen: Bench) -> Iterator[Bounds]:
    """Coins just inside both ends of a token's share give that token.

    A row is known once the tokens before it are drafted: each pass begins anew.
    """
    source = seen.source()
    coins = seen.coins(source)
    for offset in range(seen.most):
        one = seen.anew(coins)
        if one.probs is None:
            return
        for row, places in enumerate(one.drawn):
            if offset < len(places):
                node = one.draft.node(row, places[offset])
                coins[row, offset] = _border(one.probs[row, node], source)
        yield from _drawn(seen, seen.anew(coins))


def _border(row: Tensor, source: torch.Generator) -> float:
    """Return a coin just inside the first or the last end of some token's share."""
    high = row.double().cumsum(-1) / row.double().sum()
    low = torch.cat([high.new_zeros(1), high[:-1]])
    tokens = (high - low > 4 * INSIDE).nonzero()[:, 0]
    token = tokens[int(torch.randint(0, len(tokens), (1,), generator=source))]
    upper = bool(torch.randint(0, 2, (1,), generator=source))
    return float(high[token] - INSIDE if upper else low[token] + INSIDE)


@DRAFTER_PROPERTIES.enter(hint="a draft that is sampled needs the rows it was sampled from")
def certain_drafts_do_not_depend_on_the_coins(seen: Bench) -> Iterator[Bounds]:
    """A draft without rows is the same with other coins."""
    source = seen.source()
    first, second = (seen.anew(seen.coins(source)) for _ in range(2))
    if first.probs is None:
        about = "propose: a draft without rows must not depend on the coins; "
        due, found = (torch.tensor(one.lengths) for one in (first, second))
        yield Bounds(found, due, due, f"{about}how many tokens", 0.0)
        due, found = (torch.where(one.own, one.ids, -1) for one in (first, second))
        yield Bounds(found, due, due, f"{about}token {{0}}", 0.0)


@DRAFTER_PROPERTIES.enter(hint="a stream that is begun anew, or cut at the wrong place")
def every_number_is_used_once(seen: Bench) -> Iterator[Bounds]:
    """In a round of decoding no uniform number of a stream is used twice."""
    for wanted in (WANTED, WANTED[:1]):
        coins = Coins(len(wanted), 0, torch.device("cpu"))
        coins.streams = [_stream(1 + torch.arange(64.0).double()) for _ in wanted]
        draft, accept, draw = coins.toss(wanted, seen.accepting)
        draw = coins.further(draw, wanted, seen.verifier.draws).reshape(len(wanted), -1)
        for row, own in enumerate(wanted):
            parts = draft[row, :own], accept[row, : seen.accepting(own)]
            used = torch.cat([*parts, draw[row, : seen.verifier.draws(own)]])
            missing = len(used) - len(used[used != 0].unique())
            about = (
                "coins: a uniform number must be used once; a row used numbers "
                f"{used.tolist()} of its stream, for drafts, acceptance and draw: how many too few"
            )
            yield Bounds(torch.tensor([missing]), 0, 0, about, 0.0)


def _stream(numbers: Float[Tensor, "count"]) -> Uniforms:
    """Return a stream of given numbers."""
    left = [numbers]

    def take(count: int) -> Float[Tensor, "count"]:
        taken, left[0] = left[0][:count], left[0][count:]
        return taken

    return take


@DRAFTER_PROPERTIES.enter(hint="the number that drew or refused a token draws the next one too")
def each_choice_has_a_number_of_its_own(seen: Bench) -> Iterator[Bounds]:
    """The token that follows a refused one does not depend on how that one was drawn.

    One round of one drafted token is decoded with every combination of coins. The first number
    of a row's stream draws the drafted token n, the second accepts or refuses it, the third
    draws the token after it: the combinations are cells of mass p_n × Pr(accepted or not | n) ×
    its law of the next token, so this is the joint law of (drafted, accepted, next), enumerated.
    """
    if seen.accepting(1) == 1:
        for prompt in seen.prompts:
            yield from _one_round(seen, prompt)


def _one_round(bench: Bench, prompt: list[int]) -> Iterator[Bounds]:
    _, shown = decoded(bench, prompt, [[0.5, 0.5, 0.5]])
    if shown.draft is None or not shown.draft.lengths[0]:
        return
    probs = shown.draft.probs
    drafted = [(int(shown.draft.token_ids[0, 0]), 0.5)]
    if probs is not None:
        drafted = middles(probs[0, 0])
    _, shown = decoded(bench, prompt, [[u, 0.5, 0.5] for _, u in drafted])
    assert shown.q is not None and shown.draft is not None
    law = bench.verifier.law(Assignment((bench.policy,)), shown.q.double(), shown.draft)
    numbers, due = [], []
    for row, (token, u) in enumerate(drafted):
        accepted = float(law.stop[row, 1])
        for count, v, share in (
            (0, (1 + accepted) / 2, 1 - accepted),
            (1, accepted / 2, accepted),
        ):
            if share > THIN:
                for following, w in middles(law.last[row, count]):
                    numbers.append([u, v, w])
                    due.append([token][:count] + [following])
    yield from compared(bench, prompt, due, numbers)


def compared(
    bench: Bench, prompt: list[int], due: list[list[int]], numbers: list[list[float]]
) -> Iterator[Bounds]:
    """Yield whether the numbers give what is due, as one batch and singly."""
    yield _compared(decoded(bench, prompt, numbers)[0], due, numbers)
    for one, own in list(zip(numbers, due, strict=True))[:: max(1, len(due) // SINGLY)]:
        yield _compared(decoded(bench, prompt, [one])[0], [own], [one])


def middles(row: Float[Tensor, "vocab"]) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a row, each with the coin in the middle of its share."""
    row = row.double() / row.double().sum()
    middle = row.cumsum(-1) - row / 2
    best = row.topk(min(MOST, len(row))).indices
    return [(int(token), float(middle[token])) for token in best if row[token] > THIN]


def _compared(found: list[list[int]], due: list[list[int]], numbers: list[list[float]]) -> Bounds:
    other = torch.tensor([own != expected for own, expected in zip(found, due, strict=True)])

    def about(index: tuple[int, ...]) -> str:
        (at,) = index
        return (
            "coins: what is drafted, what is accepted and what follows must have numbers of "
            f"their own; with {numbers[at]} for the three, {due[at]} is due and {found[at]} was "
            "emitted: whether these differ"
        )

    return Bounds(other, 0, 0, about, 0.0)


class _Watching(Verifier):
    """A verifier that remembers what it was shown."""

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
        self.q, self.draft = target_probs.clone(), copy_of(draft)
        return self.verifier.verify(assigned, target_probs, draft, accept, draw)


def decoded(
    bench: Bench,
    prompt: list[int],
    numbers: list[list[float]],
    depth: int = 1,
    processors: Sequence[Any] = (),
) -> tuple[list[list[int]], _Watching]:
    """Decode one round that drafts paths of ``depth``, a row for each list of numbers.

    Returns the new tokens of every row, and what the verifier was shown.
    """
    watching = _Watching(bench.verifier)
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
    streams = [_stream(torch.tensor(own, dtype=torch.float64)) for own in numbers]
    opening.coins.streams = streams
    decode = Decode(opening)
    if bench.reads:  # as if a round had been there before
        _feed(decode.target, decode.texts)
    return decode.round(), watching
