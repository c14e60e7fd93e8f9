"""Check a schedule for decoding: no look-ahead, no memory between texts."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.schedule import Schedule
from cactus_theory.policies import Policy
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Draft
from cactus_theory.verify.node import Node

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

    @classmethod
    def made(cls, vocabulary: int, source: torch.Generator) -> "_Round":
        logits = 2 * torch.randn(2, WIDTH + 1, vocabulary, generator=source, dtype=torch.float64)
        q, p = logits.softmax(-1)
        drafted = torch.randint(0, vocabulary, (WIDTH,), generator=source)
        accepted = int(torch.randint(0, WIDTH + 1, (1,), generator=source))
        return cls(drafted, q, p[:WIDTH], accepted)

    @property
    def new_ids(self) -> list[int]:
        return [*self.drafted[: self.accepted].tolist(), int(self.target_probs[-1].argmax())]

    def verified(self, policies: Sequence[Policy]) -> list[Node]:
        """Return the nodes up to and including the first rejection, judged by these policies."""
        count = min(self.accepted + 1, len(self.drafted))
        rows = self.target_probs[:count].numpy(), self.draft_probs[:count].numpy()
        columns = zip(policies, *rows, self.drafted.tolist(), strict=False)
        return [Node(Chain(), *column) for column in columns]


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
    for number in range(examples):
        prompt = torch.randint(0, vocabulary, (3,), generator=source).tolist()
        rounds, others = (
            [_Round.made(vocabulary, source) for _ in range(ROUNDS)] for _ in range(2)
        )
        where = f"{schedule.spec}, text {number} of seed {seed}"
        for fault in (_of_choices, _of_later_rows, _of_steps):
            if said := fault(schedule, prompt, rounds, others):
                raise AssertionError(f"{where}: {said}")


def _chosen(schedule: Schedule, state: Any, turn: _Round) -> Tensor:
    draft = Draft(turn.drafted[None], [WIDTH], turn.draft_probs[None])
    choice, _ = schedule.choose_by_nodes(state, turn.target_probs[None], draft, JUDGE)
    return choice[:WIDTH].clone()


def _follow(schedule: Schedule, state: Any, turn: _Round) -> tuple[list[int], Any]:
    chosen, policies = _chosen(schedule, state, turn).tolist(), schedule.policies
    # numbers that are no policy's are told of by ``_of_choices``
    judged = [policies[at] for at in chosen if 0 <= at < len(policies)]
    seen = schedule.observe(state, turn.verified(judged))
    return chosen, schedule.advance(seen, turn.new_ids)


def _of_choices(
    schedule: Schedule, prompt: list[int], rounds: list[_Round], others: list[_Round]
) -> str:
    """Say if choices are no numbers of policies, or depend on what is decoded in between."""
    state, alone, most = schedule.begin(prompt), [], len(schedule.policies)
    for turn in rounds:
        chosen, state = _follow(schedule, state, turn)
        alone.append(chosen)
        if len(chosen) != WIDTH or not all(0 <= at < most for at in chosen):
            return f"choose: must return {WIDTH} numbers below {most}; got {chosen}"
    state, other = (schedule.begin(ids) for ids in (prompt, prompt[::-1]))
    for turn, foreign, expected in zip(rounds, others, alone, strict=True):
        chosen, state = _follow(schedule, state, turn)
        _, other = _follow(schedule, other, foreign)
        if chosen != expected:
            return (
                "begin: a text's choices must not depend on other texts; "
                f"got {chosen}, alone {expected}"
            )
    return ""


def _of_later_rows(
    schedule: Schedule, prompt: list[int], rounds: list[_Round], others: list[_Round]
) -> str:
    """Say if the choice for token i changes with token i, later tokens, or later rows."""
    state, turn, other = schedule.begin(prompt), rounds[0], others[0]
    expected = _chosen(schedule, copy.deepcopy(state), turn).tolist()
    for place in range(WIDTH):
        known, shown = torch.arange(WIDTH) < place, (torch.arange(WIDTH + 1) <= place)[:, None]
        changed = _Round(
            torch.where(known, turn.drafted, other.drafted),
            torch.where(shown, turn.target_probs, other.target_probs),
            torch.where(shown[:WIDTH], turn.draft_probs, other.draft_probs),
            turn.accepted,
        )
        found = _chosen(schedule, copy.deepcopy(state), changed).tolist()
        if found[: place + 1] != expected[: place + 1]:
            return (
                f"choose: the choice for token {place} must not depend on that token, on later "
                "ones or on later rows"
            )
    return ""


def _of_steps(
    schedule: Schedule, prompt: list[int], rounds: list[_Round], others: list[_Round]
) -> str:
    """Say if tokens that are handed over one by one lead elsewhere than together."""
    together, singly = (schedule.begin(prompt) for _ in range(2))
    for turn in rounds:
        together = schedule.advance(together, turn.new_ids)
        for token in turn.new_ids:
            singly = schedule.advance(singly, [token])
        states = copy.deepcopy((singly, together))
        if not torch.equal(*(_chosen(schedule, state, turn) for state in states)):
            return "advance: tokens one by one must lead where they lead together"
    return ""
