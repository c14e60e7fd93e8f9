"""Settings with their predicted speeds, which of them is recommended, and single answers.

The chosen setting is recommended if it is faster than decoding without a draft on both halves of
the texts, which a seed draws.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cactus_theory.answer_bounds import event_bounds, share
from cactus_theory.base.significance import WIDE
from cactus_theory.decoding.ledger import Ledger
from cactus_theory.policies import read_policy
from cactus_theory.traces.estimate import Estimate, Replay, valued
from cactus_theory.traces.replays import OnCycles, replay
from cactus_theory.traces.trace import Trace
from cactus_theory.tuning.costs import Costs, plain_speed, speed
from cactus_theory.tuning.families import Family

# looseness of a ledger's policy over the tuned one: prices rise as credit runs out, so it may begin
# looser. At 1, 1.4 and 2 times the looseness ledgers made as many tokens a call (± 0.003)
LOOSER = 1.4
# share of answers below the upper quantile
UPPER = 0.9
# nats an answer of the tight cap that is reported beside the usual one
TIGHT = 0.1


class Halves(NamedTuple):
    """Numbers of the texts that are chosen by, and of those that are reported."""

    chosen_by: list[int]
    reported: list[int]

    @classmethod
    def of(cls, groups: Iterable[Sequence[int]], seed: int = 0) -> "Halves":
        """Return random halves of texts, with as many texts of every group in both.

        Raises ValueError for fewer than two texts.
        """
        draw = random.Random(seed)
        order = [text for group in groups for text in draw.sample(group, len(group))]
        if len(order) < 2:
            raise ValueError(
                f"trace: must hold two texts, one to choose by and one to report; got {len(order)}"
            )
        return cls(sorted(order[::2]), sorted(order[1::2]))


@dataclass(frozen=True, eq=False)
class Answers:
    """Spread of a tuned mean over single texts, and the cap on every answer in its place.

    Coins are integrated out, so that single answers vary more than texts do.
    """

    level: float  # nats a token, the mean that was tuned for; also the cap
    above: float  # share of logged texts whose own mean is above the level
    upper: float  # the 0.9 quantile of their means
    worst: float
    policy: str  # spec of the policy in ``Ledger(policy, level)``
    verifier: str
    num_draft_tokens: int
    ratio: Estimate  # its tokens a call over those of the policy tuned for the level without a cap

    def as_json(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        own = {name: value for name, value in vars(self).items() if name != "ratio"}
        return own | valued("tokens_ratio", self.ratio)

    @property
    def sentence(self) -> str:
        """Say how single texts lie around the mean, and which cap bounds each of them."""
        lossy, error = 100 * (1 - self.ratio.value), 100 * self.ratio.standard_error
        less = f"{lossy:.1f}" if error != error else f"{lossy:.1f} ± {error:.1f}"
        return (
            f"That is a mean: {share(self.above)} of the texts lie above {self.level:g}, one in "
            f"ten above {self.upper:.3g}, the worst at {self.worst:.3g}. A cap on every answer: "
            f"generate --policy {self.policy} --verifier {self.verifier} --num-draft-tokens "
            f"{self.num_draft_tokens} --cap {self.level:g}, for {less} % fewer tokens a call."
        )

    def allowed(self, tokens: int) -> str:
        """Return the bounds of an answer of so many tokens under that cap, and a tight one."""
        usual, tight = (
            event_bounds(0.9, per_token=nats, tokens=tokens)
            for nats in (self.level, TIGHT / tokens)
        )
        return (
            f"That cap allows an answer of {tokens} tokens {usual.nats:.3g} nats: {usual.range}. "
            f"--cap {tight.per_token:.3g} allows {tight.nats:.3g}: {tight.range}."
        )


def answers_of(
    trace: Trace, choices: Sequence["Choice"], level: float, on_cycles: OnCycles
) -> Answers | None:
    """Return the spread over texts of the fastest lossy setting, a band if any, and its cap."""
    bands = [choice for choice in choices if choice.family.name == "band:price"]
    choice = fastest([choice for choice in bands or choices if not choice.family.lossless])
    if choice is None:
        return None
    verifier, width = choice.family.verifier, choice.num_draft_tokens
    free = replay(trace, choice.policy, verifier, num_draft_tokens=width)
    per_text = free.spent["kl"] / free.tokens
    price = getattr(read_policy(choice.policy), "price", None)
    looser = choice.policy if price is None else choice.family.policy(LOOSER / price).spec
    ledger, own = Ledger(looser, level), {"num_draft_tokens": width, "on_cycles": on_cycles}
    capped = replay(trace, ledger, verifier, **own)
    return Answers(
        level,
        float((per_text > level).mean()),
        float(np.quantile(per_text, UPPER)),
        float(per_text.max()),
        looser,
        verifier,
        width,
        capped.tokens_per_call / free.tokens_per_call,
    )


@dataclass(frozen=True, eq=False)
class Choice:
    """A setting, what it is predicted to do, and what it will meter.

    Attributes
    ----------
    family : as tables show it, without the knob's value.
    policy, verifier, num_draft_tokens : what to decode with.
    replay : over all texts, on which knobs are solved.
    reported : of the half that is not chosen by: all numbers of a line are of its texts.
    chosen_by, speed : tokens per unit of time on the half that is chosen by, and on the other.
    length : of its answers over lossless ones, where answers were decoded.
    """

    family: Family
    policy: str
    verifier: str
    num_draft_tokens: int
    replay: Replay
    reported: Replay
    chosen_by: Estimate
    speed: Estimate
    length: Estimate | None = None

    @property
    def longer(self) -> float:
        """Return that ratio of lengths where its 95 % interval excludes 1, else 1."""
        if (
            self.length is None
            or not abs(self.length.value - 1) > WIDE * self.length.standard_error
        ):
            return 1.0
        return self.length.value


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of tuning.

    Attributes
    ----------
    level, divergence : what may be metered per emitted token.
    costs : of calls.
    plain : tokens per unit of time without a draft.
    choices : every family and K within the level, the fastest (by ``chosen_by``) first.
    halves : of the texts of ``replay``.
    source : the trace's cycles, texts and models, and what was tried.
    answers : how the level falls on single texts, and what a cap on each would cost, if asked for.
    """

    level: float
    divergence: str
    costs: Costs
    plain: float
    choices: tuple[Choice, ...]
    halves: Halves
    source: dict[str, object] = field(default_factory=dict)
    answers: Answers | None = None

    @property
    def best(self) -> Choice | None:
        """Return the fastest setting; None if it beats plain decoding on one half or none."""
        return self._ahead(self.choices)

    @property
    def lossless(self) -> Choice | None:
        """Return the fastest lossless setting; None as for ``best``."""
        return self._ahead([choice for choice in self.choices if choice.family.lossless])

    def _ahead(self, choices: Sequence[Choice]) -> Choice | None:
        first = fastest(choices)
        if first is None:
            return None
        slower_half = min(first.chosen_by.value, first.speed.value)
        return first if slower_half / first.longer > self.plain else None

    def with_lengths(self, measure: Callable[[Choice], Estimate]) -> "Tuned":
        """Return the result ranked by answers: the two fastest settings beside lossless ones.

        ``measure`` returns the mean length of a setting's answers.
        """
        lossless = fastest([choice for choice in self.choices if choice.family.lossless])
        lossy = [choice for choice in self.choices[:2] if not choice.family.lossless]
        if lossless is None or not lossy:
            return self
        base = measure(lossless)
        lengths = {id(choice): measure(choice) / base for choice in lossy}
        choices = (replace(one, length=lengths.get(id(one))) for one in self.choices)
        return replace(self, choices=tuple(choices))

    def at_costs(self, costs: Costs) -> "Tuned":
        """Return the settings at other costs, of another batch or machine.

        Raises
        ------
        ValueError
            A family whose verification was not measured.
        """
        choices = [
            priced(choice.family, choice.replay, costs, self.halves, choice.policy)
            for choice in self.choices
        ]
        choices.sort(key=lambda choice: -choice.chosen_by.value)
        return replace(self, costs=costs, plain=plain_speed(costs), choices=tuple(choices))

    def of_families(self) -> list[Choice]:
        """Return the fastest K of every family and verifier, fastest first."""
        best: dict[str, Choice] = {}
        for choice in self.choices:
            best.setdefault(choice.family.key, choice)
        return list(best.values())


def fastest(choices: Sequence[Choice]) -> Choice | None:
    """Return the fastest setting on the half to choose by.

    Where lengths were compared it is the fastest an answer, of those that are compared.
    """
    compared = [one for one in choices if one.length is not None or one.family.lossless]
    if any(one.length is not None for one in compared):
        choices = compared
    return max(choices, key=lambda one: one.chosen_by.value / one.longer, default=None)


def priced(
    family: Family,
    replay: Replay,
    costs: Costs,
    halves: Halves,
    policy: str | None = None,
) -> Choice:
    """Return a setting with its speeds at these costs; ``policy`` is its spec."""
    chosen_by, reported = map(replay.part, halves)
    speeds = (speed(part, costs, family.key) for part in (chosen_by, reported))
    width = replay.num_draft_tokens
    spec = replay.policy if policy is None else policy
    return Choice(family, spec, replay.verifier, width, replay, reported, *speeds)
