r"""Costs of a call of the target by its parts: measured in seconds, or given as ratios.

A round that drafts K tokens takes

.. math:: t(K) = K·\mathrm{draft} + \mathrm{target}(K + 1) + \mathrm{verify} + \mathrm{other}

a text of the batch. Parts are measured at a few K and read off straight lines between these; what
was measured is a mean over rounds as they come, those without a draft as well. Ratios are per
drafted token: there K is the mean over all calls of the trace, 0 for one without a draft.

A text of N tokens takes (N + o)/E calls, where E is the tokens per call and
:math:`o = (E[X^2]/E[X] − 1)/2` what its last call would give too much (X is the tokens of one
call; the overshoot of a renewal process). So it takes start + t(K) (N + o)/E, and a text without
end E/t(K) tokens per unit of time. A round of a batch costs the mean over the rounds that were
timed at that batch size, rounds in which some of the texts had ended included.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.traces.estimate import Estimate, PerText, Replay, combined, ratio_of_sums

SECONDS, PLAIN_STEPS = "seconds", "plain steps"
PARTS = ("draft", "target", "other")


@dataclass(frozen=True)
class Costs:
    """Time of a target call, a text: that of a round of the batch over the texts in it.

    Attributes
    ----------
    unit : ``seconds``, or ``plain steps`` (``plain`` is 1 then).
    batch : texts decoded together.
    plain : of a step of plain decoding.
    widths : K, rising, at which the parts were measured.
    draft, target, other : of a round, at each of them: drafting K tokens, the target's pass over
        K + 1 positions, sampling and bookkeeping.
    verify : key of a family → the acceptance step at each of them; nothing for a family that is
        not there, if none is.
    start, plain_start : prompt and set-up, a text, beyond a usual round.
    new_tokens : length of a text that ``start`` is spread over; None for one without end.

    Examples
    --------
    >>> costs = Costs.ratios(0.1, verify_cost=0.02)  # a drafted token costs a tenth of a plain step
    >>> costs.unit, round(costs.call(4, "band:price@chain"), 3)
    ('plain steps', 1.48)
    """

    unit: str
    batch: int
    plain: float
    widths: tuple[int, ...]
    draft: tuple[float, ...]
    target: tuple[float, ...]
    other: tuple[float, ...]
    verify: Mapping[str, tuple[float, ...]]
    start: float = 0.0
    plain_start: float = 0.0
    new_tokens: float | None = None

    @classmethod
    def ratios(
        cls, cost_ratio: float, verify_cost: float = 0.0, fixed_cost: float = 0.0, batch: int = 1
    ) -> "Costs":
        """Return costs in plain steps: a round takes 1 + fixed + K (ratio + verify).

        Parameters
        ----------
        cost_ratio : of a drafted token, c.
        verify_cost : what each drafted token adds to the target's pass and its verification.
        fixed_cost : of a round, whatever it drafts.

        Raises
        ------
        ValueError
            One that is below 0 or not finite.
        """
        ratios = {"cost-ratio": cost_ratio, "verify-cost": verify_cost, "fixed-cost": fixed_cost}
        c, v, f = (check.finite(name, value, 0) for name, value in ratios.items())
        return cls(
            unit=PLAIN_STEPS,
            batch=batch,
            plain=1.0,
            widths=(1, 2),
            draft=(c, 2 * c),
            target=(1 + v, 1 + 2 * v),
            other=(f, f),
            verify={},
        )

    def call(self, width: int, family: str) -> float:
        """Return the time of a call with K drafted tokens.

        Raises
        ------
        ValueError
            A family whose verification was not measured.
        """
        spent = sum(self.part(name, width) for name in PARTS)
        if not self.verify:
            return spent
        verify = self.verify[check.one_of("family", family, tuple(self.verify))]
        return spent + self._read(verify, width)

    def part(self, name: str, width: int) -> float:
        """Return one of PARTS at K."""
        return self._read(getattr(self, name), width)

    def _read(self, part: Sequence[float], width: int) -> float:
        """Return a part at K: on a line between two measured K, beyond them on the last line."""
        if len(self.widths) == 1:
            return part[0]
        place = min(max(bisect(self.widths, width) - 1, 0), len(self.widths) - 2)
        low, high = self.widths[place : place + 2]
        share = (width - low) / (high - low)
        return part[place] + share * (part[place + 1] - part[place])


def plain_speed(costs: Costs) -> float:
    """Return the tokens per unit of time of decoding without a draft."""
    if costs.new_tokens is None:
        return 1 / costs.plain
    return costs.new_tokens / (costs.plain_start + costs.new_tokens * costs.plain)


def speed(own: Replay, costs: Costs, family: str) -> Estimate:
    """Return the tokens per unit of time of a batch; its standard error is that of the trace.

    Raises
    ------
    ValueError
        A family whose verification was not measured.
    """
    ends = (own.num_draft_tokens,) * 2 if costs.unit == SECONDS else (0, 1)
    first, second = (costs.call(width, family) for width in ends)
    numbers = (ratio_of_sums(sums, own.cycles, own.source) for sums in _sums(own))
    return combined(partial(_speed, costs, first, second - first), *numbers)


def _speed(costs: Costs, first: float, slope: float, tokens: Any, squares: Any, k: Any) -> Any:
    call = first + slope * k
    if costs.new_tokens is None:
        return tokens / call
    over = (squares / tokens - 1) / 2
    calls = (costs.new_tokens + over) / tokens
    return costs.new_tokens / (costs.start + call * calls)


def _sums(replay: Replay) -> tuple[PerText, PerText, PerText]:
    """Return tokens of calls, their squares Σ (2 i + 1) Pr(more than i), and drafted tokens."""
    alone = replay.cycles - replay.drafts  # one token each
    last = replay.tokens - alone - replay.reached.sum(0)  # the bonus
    probable = np.concatenate([replay.reached, last[None]])
    weights = 2 * np.arange(len(probable)) + 1
    return replay.tokens, alone + (weights[:, None] * probable).sum(0), replay.drafted
