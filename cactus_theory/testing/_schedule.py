"""Hold a schedule to what decoding relies on: no look-ahead, no memory between texts."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule

WIDTH = 6  # drafted tokens of a round
ROUNDS = 4  # rounds of a text


@dataclass(frozen=True)
class _Round:
    """One round of a made-up text: what is drafted, on which rows, and what is emitted."""

    drafted: Tensor
    target_probs: Tensor
    draft_probs: Tensor
    accepted: int

    @property
    def new_ids(self) -> list[int]:
        """Return the accepted tokens and one more."""
        return [*self.drafted[: self.accepted].tolist(), int(self.target_probs[-1].argmax())]

    def verified(self) -> VerifiedRows:
        """Return the rows up to and including the first refusal."""
        count = min(self.accepted + 1, len(self.drafted))
        kept = torch.arange(count) < self.accepted
        rows = self.target_probs[:count].double(), self.draft_probs[:count].double()
        return VerifiedRows(*rows, self.drafted[:count], kept)


def assert_schedule_properties(
    schedule: Schedule, *, vocabulary: int = 12, examples: int = 50, seed: int = 0
) -> None:
    """Check a schedule on made-up texts; raise AssertionError with the first property broken.

    * Every choice is a number of one of its ``rules``, one a drafted token.
    * The choice for token i does not change with token i, later tokens, or rows after
      number i: a policy may know only what was known before the token was drawn.
    * A text's choices depend on that text alone: the state is begun anew for each, and other
      texts decoded in between change nothing.
    * Tokens may be handed to ``advance`` one by one or together.

    Parameters
    ----------
    vocabulary : tokens of the made-up texts are 0 … vocabulary − 1; take it large enough to
        hold the markers that the schedule looks for.
    examples : texts to try; ``seed`` fixes which.

    Raises
    ------
    AssertionError
        A property is broken.

    Examples
    --------
    >>> from cactus_theory.decoding import ByPosition
    >>> steps = [(0, "speculative"), (8, "band:price=1")]
    >>> assert_schedule_properties(ByPosition(steps), examples=5)
    """
    source = torch.Generator().manual_seed(seed)
    for _ in range(examples):
        prompt = torch.randint(0, vocabulary, (3,), generator=source).tolist()
        rounds = [_round(vocabulary, source) for _ in range(ROUNDS)]
        others = [_round(vocabulary, source) for _ in range(ROUNDS)]
        alone = list(_choices(schedule, prompt, rounds))
        for choice in alone:
            _check_range(schedule, choice)
        _check_fresh(schedule, prompt, rounds, others, alone)
        _check_blind(schedule, schedule.begin(prompt), rounds[0], others[0])
        _check_parts(schedule, prompt, rounds)


def _round(vocabulary: int, source: torch.Generator) -> _Round:
    logits = 2 * torch.randn(2, WIDTH + 1, vocabulary, generator=source, dtype=torch.float64)
    q, p = logits.softmax(-1)
    drafted = torch.randint(0, vocabulary, (WIDTH,), generator=source)
    accepted = int(torch.randint(0, WIDTH + 1, (1,), generator=source))
    return _Round(drafted, q[:WIDTH], p[:WIDTH], accepted)


def _chosen(schedule: Schedule, state: Any, own: _Round) -> list[int]:
    found = schedule.choose_by_rows(state, own.drafted, own.target_probs, own.draft_probs)
    return found.tolist()


def _after(schedule: Schedule, state: Any, own: _Round) -> Any:
    return schedule.advance(schedule.observe(state, own.verified()), own.new_ids)


def _choices(schedule: Schedule, prompt: list[int], rounds: list[_Round]) -> Iterator[list[int]]:
    state = schedule.begin(prompt)
    for own in rounds:
        yield _chosen(schedule, state, own)
        state = _after(schedule, state, own)


def _check_range(schedule: Schedule, choice: list[int]) -> None:
    numbers = range(len(schedule.rules))
    if len(choice) != WIDTH or any(number not in numbers for number in choice):
        raise AssertionError(
            f"choose: must return {WIDTH} numbers below {len(numbers)}; got {choice}"
        )


def _check_fresh(
    schedule: Schedule,
    prompt: list[int],
    rounds: list[_Round],
    others: list[_Round],
    alone: list[list[int]],
) -> None:
    """Decode the text again with another one in between, round by round."""
    state, other = schedule.begin(prompt), schedule.begin(prompt[::-1])
    for own, foreign, expected in zip(rounds, others, alone, strict=True):
        found = _chosen(schedule, state, own)
        if found != expected:
            raise AssertionError(
                "begin: a text's choices must not depend on other texts; "
                f"alone {expected}, beside another {found}"
            )
        state, other = _after(schedule, state, own), _after(schedule, other, foreign)


def _check_blind(schedule: Schedule, state: Any, own: _Round, other: _Round) -> None:
    """Change everything that token i must not know, for every i."""
    expected = _chosen(schedule, copy.deepcopy(state), own)
    for place in range(WIDTH):
        drafted, q, p = own.drafted.clone(), own.target_probs.clone(), own.draft_probs.clone()
        drafted[place:] = other.drafted[place:]
        q[place + 1 :], p[place + 1 :] = (
            other.target_probs[place + 1 :],
            other.draft_probs[place + 1 :],
        )
        changed = _Round(drafted, q, p, own.accepted)
        found = _chosen(schedule, copy.deepcopy(state), changed)
        if found[: place + 1] != expected[: place + 1]:
            raise AssertionError(
                f"choose: the choice for token {place} must not depend on that token, on later "
                f"ones or on later rows; got {found[: place + 1]} and {expected[: place + 1]}"
            )


def _check_parts(schedule: Schedule, prompt: list[int], rounds: list[_Round]) -> None:
    together, singly = schedule.begin(prompt), schedule.begin(prompt)
    for own in rounds:
        together = schedule.advance(together, own.new_ids)
        for token in own.new_ids:
            singly = schedule.advance(singly, [token])
        if _chosen(schedule, copy.deepcopy(together), own) != _chosen(
            schedule, copy.deepcopy(singly), own
        ):
            raise AssertionError("advance: tokens one by one must lead where they lead together")
