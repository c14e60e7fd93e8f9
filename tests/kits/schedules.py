"""Check a schedule for decoding: no look-ahead, no memory between texts."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule
from cactus_theory.policies import Policy
from cactus_theory.testing._property import Bounds, Properties, Seen, broken
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Draft

SCHEDULE_PROPERTIES = Properties("schedule_property")
WIDTH = 6  # drafted tokens of a round
ROUNDS = 4  # rounds of a text
JUDGE = find_verifier("chain")


@dataclass(frozen=True)
class _Round:
    """A round of a made-up text: drafted tokens, their rows, and how many are accepted."""

    drafted: Tensor
    target_probs: Tensor
    draft_probs: Tensor
    accepted: int

    @property
    def new_ids(self) -> list[int]:
        """Return the accepted tokens and one more."""
        return [*self.drafted[: self.accepted].tolist(), int(self.target_probs[-1].argmax())]

    def verified(self, policies: Sequence[Policy]) -> VerifiedRows:
        """Return the rows up to and including the first refusal, judged by these policies."""
        count = min(self.accepted + 1, len(self.drafted))
        accepted = torch.arange(count) < self.accepted
        rows = self.target_probs[:count].double(), self.draft_probs[:count].double()
        return VerifiedRows(*rows, self.drafted[:count], accepted, tuple(policies[:count]))


def assert_schedule_properties(
    schedule: Schedule, *, vocabulary: int = 12, examples: int = 50, seed: int = 0
) -> None:
    """Check a schedule on made-up texts; raise AssertionError with the first property broken.

    * Every choice is a number of one of its ``policies``, one a drafted token.
    * The choice for token i does not change with token i, later tokens, or rows after
      number i: a policy may know only what was known before the token was drawn.
    * A text's choices depend on that text alone: the state is begun anew for each, and other
      texts decoded in between change nothing.
    * Tokens may be handed to ``advance`` one by one or together.
    """
    source = torch.Generator().manual_seed(seed)
    texts = (_Text(schedule, vocabulary, source, (number, seed)) for number in range(examples))
    if fault := broken(schedule.spec, texts, SCHEDULE_PROPERTIES.values()):
        raise AssertionError(fault)


class _Text(Seen):
    """The choices of a schedule on a made-up text, and the rounds of another text."""

    def __init__(
        self,
        schedule: Schedule,
        vocabulary: int,
        source: torch.Generator,
        place: tuple[int, int],
    ) -> None:
        self.schedule, self.place = schedule, place
        self.prompt = torch.randint(0, vocabulary, (3,), generator=source).tolist()
        self.rounds = [_round(vocabulary, source) for _ in range(ROUNDS)]
        self.others = [_round(vocabulary, source) for _ in range(ROUNDS)]

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        yield "text", f"number {self.place[0]}: prompt {self.prompt}"

    def again(self, row: int, name: str) -> str:
        """Return the call that checks this text, and those before it, again."""
        number, seed = self.place
        return f"assert_schedule_properties(…, examples={number + 1}, seed={seed})"

    def chosen(self, state: Any, turn: _Round) -> Tensor:
        """Return the choices of a round, (K,)."""
        draft = Draft(turn.drafted[None], [WIDTH], turn.draft_probs[None])
        return self.schedule.choose_by_nodes(state, turn.target_probs[None], draft, JUDGE)[0]

    def follow(self, state: Any, turn: _Round) -> tuple[Tensor, Any]:
        """Return the choices of a round, (K,), and the state after it."""
        chosen, policies = self.chosen(state, turn).clone(), self.schedule.policies
        # numbers that are no policy's are left to ``choices_are_numbers_of_policies``
        judged = [policies[at] for at in chosen.tolist() if 0 <= at < len(policies)]
        seen = self.schedule.observe(state, turn.verified(judged))
        return chosen, self.schedule.advance(seen, turn.new_ids)

    @cached_property
    def alone(self) -> list[Tensor]:
        """Return the choices of every round, (K,) each."""
        state, choices = self.schedule.begin(self.prompt), []
        for turn in self.rounds:
            chosen, state = self.follow(state, turn)
            choices.append(chosen)
        return choices


def _round(vocabulary: int, source: torch.Generator) -> _Round:
    logits = 2 * torch.randn(2, WIDTH + 1, vocabulary, generator=source, dtype=torch.float64)
    q, p = logits.softmax(-1)
    drafted = torch.randint(0, vocabulary, (WIDTH,), generator=source)
    accepted = int(torch.randint(0, WIDTH + 1, (1,), generator=source))
    return _Round(drafted, q[:WIDTH], p[:WIDTH], accepted)


@SCHEDULE_PROPERTIES.register(hint="choices that are not indices of policies, or of another length")
def choices_are_numbers_of_policies(seen: _Text) -> Iterator[Bounds]:
    """Every choice is a number of one of the schedule's policies, one a drafted token."""
    most = len(seen.schedule.policies)
    about = f"choose: must return {WIDTH} numbers below {most}"
    lengths = torch.tensor([len(choice) for choice in seen.alone])
    yield Bounds(lengths, WIDTH, WIDTH, f"{about}: how many it returns", 0.0)
    yield Bounds(torch.stack(seen.alone), 0, most - 1, f"{about}: that of token {{0}}", 0.0)


@SCHEDULE_PROPERTIES.register(hint="a state on the object itself, not the one that begin returns")
def texts_are_chosen_for_alone(seen: _Text) -> Iterator[Bounds]:
    """A text's choices depend on that text alone, whatever is decoded in between."""
    state, other = (seen.schedule.begin(prompt) for prompt in (seen.prompt, seen.prompt[::-1]))
    choices = []
    for turn, foreign in zip(seen.rounds, seen.others, strict=True):
        chosen, state = seen.follow(state, turn)
        choices.append(chosen)
        _, other = seen.follow(other, foreign)
    about = "begin: a text's choices must not depend on other texts; that of token {0}"
    expected = torch.stack(seen.alone)
    yield Bounds(torch.stack(choices), expected, expected, about, 0.0)


@SCHEDULE_PROPERTIES.register(hint="the token itself, or what is known only after it was drawn")
def choices_look_at_nothing_later(seen: _Text) -> Iterator[Bounds]:
    """The choice for token i does not change with token i, later tokens, or later rows."""
    state, turn, other = seen.schedule.begin(seen.prompt), seen.rounds[0], seen.others[0]
    expected = seen.chosen(copy.deepcopy(state), turn).clone()
    choices = []
    for place in range(WIDTH):
        known = torch.arange(WIDTH) < place
        shown = (torch.arange(WIDTH) <= place)[:, None]
        changed = _Round(
            torch.where(known, turn.drafted, other.drafted),
            torch.where(shown, turn.target_probs, other.target_probs),
            torch.where(shown, turn.draft_probs, other.draft_probs),
            turn.accepted,
        )
        choices.append(seen.chosen(copy.deepcopy(state), changed).clone())

    def about(index: tuple[int, ...]) -> str:
        return (
            f"choose: the choice for token {index[0]} must not depend on that token, on later "
            f"ones or on later rows; that of token {index[1]}"
        )

    judged = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    yield Bounds(torch.stack(choices), expected, expected, about, 0.0, judged)


@SCHEDULE_PROPERTIES.register(hint="advance counts its calls, not the tokens that it is given")
def tokens_advance_one_by_one_or_together(seen: _Text) -> Iterator[Bounds]:
    """Tokens may be handed to ``advance`` one by one or together."""
    together, singly = (seen.schedule.begin(seen.prompt) for _ in range(2))
    choices: tuple[list[Tensor], list[Tensor]] = [], []
    for turn in seen.rounds:
        together = seen.schedule.advance(together, turn.new_ids)
        for token in turn.new_ids:
            singly = seen.schedule.advance(singly, [token])
        for state, rounds in zip((singly, together), choices, strict=True):
            rounds.append(seen.chosen(copy.deepcopy(state), turn).clone())
    singles, expected = map(torch.stack, choices)
    about = "advance: tokens one by one must lead where they lead together; choice of token {0}"
    yield Bounds(singles, expected, expected, about, 0.0)
