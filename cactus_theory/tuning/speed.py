r"""Tokens per second from tokens per call and the costs of a call.

A text of N tokens takes (N + o)/E calls, where E is the tokens per call and
:math:`o = (E[X^2]/E[X] − 1)/2` what its last call would give too much (X is the tokens of one
call; the overshoot of a renewal process). So it takes start + t(K) (N + o)/E, and a text without
end E/t(K) tokens per unit of time. Of a batch the texts are taken to be as full of rounds as those
that were timed: rounds in which some have ended already cost what they cost there.
"""

from functools import partial
from typing import Any

import numpy as np

from cactus_theory.traces.estimate import Estimate, Replay, combined, ratio_of_sums
from cactus_theory.tuning.costs import Costs
from cactus_theory.tuning.trees import TreeReplay


def plain_speed(costs: Costs) -> float:
    """Return the tokens per unit of time of decoding without a draft.

    Examples
    --------
    >>> plain_speed(Costs.ratios(0.1))
    1.0
    """
    if costs.new_tokens is None:
        return 1 / costs.plain
    return costs.new_tokens / (costs.plain_start + costs.new_tokens * costs.plain)


def speed(own: Replay, costs: Costs, family: str, times: float = 1.0) -> Estimate:
    """Return the tokens per unit of time of a batch; its standard error is that of the trace.

    ``times`` as in :meth:`Costs.call`.

    Raises
    ------
    ValueError
        A family whose verification was not measured.

    Examples
    --------
    >>> from cactus_theory.traces import SavedRows, replay
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> own = replay(SavedRows.of(q, p), "band:price=1")
    >>> round(speed(own, Costs.ratios(0.1), "band:price@chain").value, 3)
    1.593
    """
    call = costs.call(own.num_draft_tokens, family, times)
    return combined(partial(_speed, costs, call), own.tokens_per_call, _squares(own))


def _speed(costs: Costs, call: float, tokens: Any, squares: Any) -> Any:
    if costs.new_tokens is None:
        return tokens / call
    over = (squares / tokens - 1) / 2
    calls = (costs.new_tokens + over) / tokens
    return costs.new_tokens / (costs.start + call * calls)


def _squares(own: Replay) -> Estimate:
    """Return the mean square of the tokens of a call: Σ (2 i + 1) Pr(more than i tokens)."""
    last = own.tokens - own.reached.sum(0)  # the bonus
    more = np.concatenate([own.reached, last[None]])
    if isinstance(own, TreeReplay):  # the token after one that is caught is no bonus
        more[-1] -= own.followed.sum(0)
        more[1:] += own.followed
    weights = 2 * np.arange(len(more)) + 1
    return ratio_of_sums((weights[:, None] * more).sum(0), own.cycles, own.source)
