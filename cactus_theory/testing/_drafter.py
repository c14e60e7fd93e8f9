"""Hold a drafter to what acceptance relies on: its tokens are drawn from the rows it reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.drafters import Drafter, Drafting, Setting, as_drafter
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.testing._shared_coins import check_every_number_is_used_once, check_one_round
from cactus_theory.verify import Draft, Verifier, find_verifier
from cactus_theory.verify.draw import pick

# tokens of the made-up prompts: in the third and the last an n-gram drafter finds something
PROMPTS = ((1, 5, 9), (2,), (3, 3, 7, 3, 3, 7, 3), (8, 4, 8, 1, 8, 4))
# rows are float32, and sum to 1 up to its rounding
SUMS = 1e-4
# a model run with its cache and without, in float32
AGREES = 1e-4
# a coin this far inside a token's share cannot be mistaken for its neighbour's
INSIDE = 1e-6


@dataclass(frozen=True)
class _Bench:
    """A drafter on made-up prompts."""

    drafter: Drafter
    target_model: Any
    prompts: list[list[int]]
    temperature: float
    width: int
    room: int

    def begin(self) -> tuple[Texts, Drafting]:
        """Return new texts and the drafter at work on them."""
        device = torch.device("cpu")
        texts = Texts(self.prompts, self.room, frozenset(), device)
        warp = Warp(self.temperature, (), [0] * len(self.prompts))
        setting = Setting(self.target_model, texts, warp, Stopwatch(), self.width)
        return texts, self.drafter.begin(setting)


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
    drafter = as_drafter(drafter)
    vocab = text_config(target_model).vocab_size
    prompts = [[token % vocab for token in prompt] for prompt in PROMPTS]
    room = (num_draft_tokens + 1) * (rounds + 1)
    bench = _Bench(drafter, target_model, prompts, temperature, num_draft_tokens, room)
    with torch.inference_mode():
        checked = _check_rounds(bench, model, rounds, seed)
        _check_borders(bench, seed)
        _check_certain(bench, seed)
        judge, rule = find_verifier(verifier), find_policy(policy)
        check_every_number_is_used_once(judge)
        if judge.coins(1) == 1:
            for prompt in prompts:
                check_one_round(drafter, target_model, prompt, temperature, judge, rule)
    return checked


def _check_rounds(bench: _Bench, model: Any, rounds: int, seed: int) -> int:
    """Draft on texts that go on unequally, and look at every token; return how many."""
    texts, drafting = bench.begin()
    source = torch.Generator().manual_seed(seed)
    vocab, checked = text_config(bench.target_model).vocab_size, 0
    for turn in range(rounds):
        wanted = [bench.width - (row + turn) % min(3, bench.width) for row in range(texts.batch)]
        coins = torch.rand(texts.batch, bench.width, generator=source, dtype=torch.float64)
        before = [list(ids) for ids in texts.ids]
        draft = drafting.propose(wanted, coins)
        checked += _check_draft(texts, draft, wanted, coins)
        if model is not None and draft.probs is not None:
            _check_rows(model, bench.temperature, before, draft)
        last = torch.randint(0, vocab, (texts.batch,), generator=source)
        texts.settle(list(_taken(draft, turn, last.tolist())), last)
        drafting.settle()
    return checked


def _taken(draft: Draft, turn: int, last: Sequence[int]) -> Iterator[list[int]]:
    """Yield what each row goes on with: some of its draft, and one more token."""
    for row, (ids, count) in enumerate(zip(draft.token_ids.tolist(), draft.lengths, strict=True)):
        yield [*ids[: min((turn + row) % 4, count)], last[row]]


def _check_draft(texts: Texts, draft: Draft, wanted: Sequence[int], coins: Tensor) -> int:
    for row, (count, most) in enumerate(zip(draft.lengths, wanted, strict=True)):
        if count > most:
            raise AssertionError(f"propose: must draft at most {most} tokens; got {count}")
        ids = draft.token_ids[row, :count]
        first = texts.lengths[row]
        written = texts.buffer[row, first : first + count]
        if not torch.equal(written, ids):
            raise AssertionError(
                f"propose: must write its tokens into the texts; drafted {ids.tolist()}, "
                f"wrote {written.tolist()}"
            )
        if draft.probs is not None:
            _check_drawn(draft.probs[row, :count], ids, coins[row, :count])
    return sum(draft.lengths)


def _check_drawn(rows: Tensor, ids: Tensor, coins: Tensor) -> None:
    if bool((rows < 0).any()) or bool(((rows.double().sum(-1) - 1).abs() > SUMS).any()):
        raise AssertionError(f"propose: rows must be distributions; got {rows.tolist()}")
    due = pick(rows, coins) if len(ids) else ids
    if not torch.equal(due, ids):
        place = int((due != ids).nonzero()[0])
        raise AssertionError(
            "propose: tokens must be drawn from the reported rows, by their coins; token "
            f"{place} of {ids.tolist()} with coin {float(coins[place])!r} must be "
            f"{int(due[place])}, of row {rows[place].tolist()}"
        )


def _check_rows(model: Any, temperature: float, before: list[list[int]], draft: Draft) -> None:
    """Compare reported rows with the model's own, text by text and without a cache."""
    assert draft.probs is not None
    for row, count in enumerate(draft.lengths):
        if not count:
            continue
        text = torch.tensor([before[row] + draft.token_ids[row, :count].tolist()])
        logits = model(input_ids=text, use_cache=False).logits[0, -count - 1 : -1]
        own = (logits.double() / temperature).softmax(-1)
        reported = draft.probs[row, :count].double()
        certain = reported.amax(-1) == 1.0
        if bool(((reported - own)[~certain].abs() > AGREES).any()):
            apart = float((reported - own)[~certain].abs().amax())
            raise AssertionError(
                f"propose: rows must be the model's own after {text[0].tolist()[:-count]}; "
                f"they differ by {apart:.3g}"
            )


def _check_borders(bench: _Bench, seed: int) -> None:
    """Draft with coins just inside the ends of a token's share, offset by offset.

    A row is known once the tokens before it are drafted: each pass begins anew.
    """
    source = torch.Generator().manual_seed(seed)
    coins = torch.rand(len(bench.prompts), bench.width, generator=source, dtype=torch.float64)
    for offset in range(bench.width):
        draft = _anew(bench, coins)[1]
        if draft.probs is None:
            return
        for row, count in enumerate(draft.lengths):
            if offset < count:
                coins[row, offset] = _border(draft.probs[row, offset], source)
        texts, draft = _anew(bench, coins)
        _check_draft(texts, draft, [bench.width] * texts.batch, coins)


def _anew(bench: _Bench, coins: Tensor) -> tuple[Texts, Draft]:
    texts, drafting = bench.begin()
    return texts, drafting.propose([bench.width] * texts.batch, coins)


def _border(row: Tensor, source: torch.Generator) -> float:
    """Return a coin just inside the first or the last end of some token's share."""
    high = row.double().cumsum(-1) / row.double().sum()
    low = torch.cat([high.new_zeros(1), high[:-1]])
    tokens = (high - low > 4 * INSIDE).nonzero()[:, 0]
    token = tokens[int(torch.randint(0, len(tokens), (1,), generator=source))]
    upper = bool(torch.randint(0, 2, (1,), generator=source))
    return float(high[token] - INSIDE if upper else low[token] + INSIDE)


def _check_certain(bench: _Bench, seed: int) -> None:
    """Draft twice with different coins: a draft without rows must be the same."""
    source = torch.Generator().manual_seed(seed)
    shape = len(bench.prompts), bench.width
    first, second = (
        _anew(bench, torch.rand(shape, generator=source, dtype=torch.float64))[1] for _ in range(2)
    )
    if first.probs is None and first.token_ids.tolist() != second.token_ids.tolist():
        raise AssertionError(
            "propose: a draft without rows must not depend on the coins; got "
            f"{first.token_ids.tolist()} and {second.token_ids.tolist()}"
        )
