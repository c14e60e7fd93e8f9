r"""Model the time of a target call by its parts, measured in seconds or given as ratios.

A round that drafts K tokens takes, for each text of the batch,

.. math:: t(K) = K·\mathrm{draft} + \mathrm{target}(K + 1) + \mathrm{verify} + \mathrm{other}

Parts are measured at a few K and interpolated linearly. Measured parts are means over all rounds,
also those without a draft. Ratios are per drafted token: K is then the mean number of drafted
tokens over all calls of the trace.

A text of N tokens takes (N + o)/E calls, where E is the mean of X, the tokens of one call, and
:math:`o = (E[X^2]/E[X] − 1)/2` is the mean number of tokens by which the last call exceeds N (the
overshoot of a renewal process). So the text takes the time start + t(K) (N + o)/E, and a text
without end gives E/t(K) tokens per unit of time. The time of a batch's round is the mean over all
rounds that were timed at that batch size, also rounds in which some texts had ended.
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
    """Time of a target call by its parts, per text: a batch's time over the number of texts.

    Attributes
    ----------
    unit : unit of all times: ``seconds``, or ``plain steps`` (then ``plain`` is 1).
    batch : number of texts decoded together.
    plain : time of one step of plain decoding.
    widths : rising values of K at which the parts were measured.
    draft : time of drafting K tokens, at each K.
    target : time of the target's pass over K + 1 positions, at each K.
    other : time of sampling and bookkeeping, at each K.
    verify : time of verification at each K, by family (``Family.key``); empty if it is in
        ``target``.
    start, plain_start : time of prompt and set-up beyond a usual round, with and without a draft.
    new_tokens : tokens of a text over which ``start`` is spread; None for a text without end.

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
        cost_ratio : c, the time to draft one token, over the time of a plain step.
        verify_cost : plain steps that each drafted token adds to the target's and verifier's work.
        fixed_cost : plain steps that a round takes whatever the number of drafted tokens.
        batch : number of texts decoded together.

        Raises
        ------
        ValueError
            A cost that is below 0 or not finite.
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
        """Return the time of a call with ``width`` drafted tokens; ``family`` is a ``Family.key``.

        Raises
        ------
        ValueError
            The verification of the family was not measured.
        """
        time = sum(self.part(name, width) for name in PARTS)
        if not self.verify:
            return time
        verify = self.verify[check.one_of("family", family, tuple(self.verify))]
        return time + self._read(verify, width)

    def part(self, name: str, width: int) -> float:
        """Return the time of the part ``draft``, ``target`` or ``other`` at K = ``width``."""
        return self._read(getattr(self, name), width)

    def _read(self, part: Sequence[float], width: int) -> float:
        """Return a part at K, interpolated linearly, or extrapolated from the two nearest K."""
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


def speed(replay: Replay, costs: Costs, family: str) -> Estimate:
    """Predict tokens per unit of time; the standard error is over the texts of the trace.

    Raises
    ------
    ValueError
        The verification of the family was not measured.
    """
    # measured: the time at K, whatever a round drafts; ratios: linear in the drafted tokens
    measured = costs.unit == SECONDS
    first = costs.call(replay.num_draft_tokens if measured else 0, family)
    slope = 0.0 if measured else costs.call(1, family) - first
    numbers = (ratio_of_sums(sums, replay.cycles, replay.source) for sums in _sums(replay))
    return combined(partial(_speed, costs, first, slope), *numbers)


def _speed(costs: Costs, first: float, slope: float, tokens: Any, squares: Any, k: Any) -> Any:
    """Return the speed if a call that drafts k tokens takes first + slope k.

    ``tokens`` and ``squares`` are E[X] and E[X²] of the tokens X of a call.
    """
    call = first + slope * k
    if costs.new_tokens is None:
        return tokens / call
    overshoot = (squares / tokens - 1) / 2
    calls = (costs.new_tokens + overshoot) / tokens
    return costs.new_tokens / (costs.start + call * calls)


def _sums(replay: Replay) -> tuple[PerText, PerText, PerText]:
    """Return by text sums over calls of E[X], of E[X²] = Σ (2 i + 1) Pr(X > i), and of K."""
    alone = replay.cycles - replay.drafts  # calls without a draft, of one token each
    last = replay.tokens - alone - replay.reached.sum(0)  # bonus tokens
    # (K + 1, T), number of calls with a draft that give more than i tokens
    exceeding = np.concatenate([replay.reached, last[None]])
    weights = 2 * np.arange(len(exceeding)) + 1
    return replay.tokens, alone + (weights[:, None] * exceeding).sum(0), replay.drafted
