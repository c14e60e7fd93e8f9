"""How many tokens to draft a round: fixed, adapted to the text, or none while plain is faster."""

import math
from dataclasses import dataclass

# weight of the newest round in the running acceptance and costs: they average about 20 rounds
FORGETTING = 0.05
# the acceptance assumed before any draft was verified, with the weight of so many tokens
FIRST_GUESS = 0.7
FIRST_WEIGHT = 8.0
# rounds of each kind that the gate measures before it compares, and after how many it tries again
PROBE = 4
LOOK_AGAIN = 64


@dataclass(frozen=True)
class Round:
    """What one round did, over all rows: sums of counts, seconds by part.

    ``seconds`` is all of it but metering and callbacks, ``rows`` how many texts took part.
    """

    drafted: int
    accepted: int
    refused: int
    emitted: int
    steps: int
    draft_seconds: float
    target_seconds: float
    seconds: float
    verify_seconds: float = 0.0
    rows: int = 1


class Pace:
    """The number K of drafted tokens before each round: here always ``most``."""

    learns = False

    def __init__(self, most: int) -> None:
        self.most = most

    def width(self) -> int:
        """Return K for the next round; 0 takes a plain step."""
        return self.most

    def note(self, done: Round) -> None:
        """Learn from a round."""


class AdaptivePace(Pace):
    r"""The K ≤ ``most`` that promises most tokens per second.

    With running acceptance a and c = seconds of a drafted token / seconds of a target call,
    maximises :math:`(1 - a^{K+1}) / ((1 - a)(Kc + 1))`. K depends on past rounds only, so the
    law of the text does not change.
    """

    learns = True

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.tried, self.kept = FIRST_WEIGHT, FIRST_GUESS * FIRST_WEIGHT
        self.draft = self.target = 0.0

    @property
    def acceptance(self) -> float:
        """Return the running probability that a verified token is kept."""
        return self.kept / self.tried

    @property
    def cost_ratio(self) -> float:
        """Return seconds of a drafted token over seconds of a target call, 0.2 unmeasured."""
        return self.draft / self.target if self.target and self.draft else 0.2

    def width(self) -> int:
        """Return the K of most tokens per second."""
        return max(range(1, self.most + 1), key=self.speed)

    def speed(self, width: int) -> float:
        """Return expected tokens per target call, over its cost in target calls."""
        a = min(self.acceptance, 1 - 1e-9)
        return (1 - a ** (width + 1)) / (1 - a) / (width * self.cost_ratio + 1)

    def note(self, done: Round) -> None:
        """Update the running acceptance and costs."""
        if not done.drafted:
            return
        keep = 1 - FORGETTING
        self.tried = keep * self.tried + done.accepted + done.refused
        self.kept = keep * self.kept + done.accepted
        self.draft = keep * self.draft + done.draft_seconds / done.steps
        self.target = keep * self.target + done.target_seconds


class Gate(Pace):
    """Drafts while that is faster than not drafting, measured on this machine and text.

    Times ``PROBE`` speculative rounds and ``PROBE`` plain steps, then takes, before every
    round, the kind of fewer seconds per emitted token, of which the kind in use keeps a
    running mean. Tries the other kind again at intervals that double from ``LOOK_AGAIN``
    rounds. The first round after a switch, which catches up, is not counted.
    """

    learns = True

    def __init__(self, inner: Pace) -> None:
        self.inner = inner
        self.seconds = {True: 0.0, False: 0.0}
        self.tokens = {True: 0.0, False: 0.0}
        self.interval, self.since = LOOK_AGAIN, 0
        self.turn(True)

    def turn(self, drafting: bool) -> None:
        """Go on with a kind for at least ``PROBE`` counted rounds."""
        self.drafting, self.fresh, self.remaining = drafting, True, PROBE + 1

    def cost(self, drafting: bool) -> float:
        """Return running seconds per emitted token of a kind, infinite while unmeasured."""
        return self.seconds[drafting] / self.tokens[drafting] if self.tokens[drafting] else math.inf

    def width(self) -> int:
        """Return the inner pace's K, or 0."""
        return self.inner.width() if self.drafting else 0

    def note(self, done: Round) -> None:
        """Learn from a round and decide what the next one is."""
        self.inner.note(done)
        now, other = self.drafting, not self.drafting
        if not self.fresh:
            self.seconds[now] = (1 - FORGETTING) * self.seconds[now] + done.seconds
            self.tokens[now] = (1 - FORGETTING) * self.tokens[now] + done.emitted
        self.fresh = False
        self.remaining -= 1
        self.since += 1
        if self.remaining > 0:
            return
        if self.since >= self.interval:
            self.seconds[other] = self.tokens[other] = 0.0
            self.interval, self.since = 2 * self.interval, 0
        if not self.tokens[other] or self.cost(other) < self.cost(now):
            self.turn(other)
