"""Compare replays of the same cycles: paired differences, and levels at equal divergence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from cactus_theory.traces._result import Replay
from cactus_theory.traces.estimate import Estimate


@dataclass(frozen=True, eq=False)
class Comparison:
    """The first replay minus the second, by paired texts.

    Attributes
    ----------
    tokens_per_call, accepted_per_call : differences.
    tokens_ratio : first over second, tokens per call.
    divergence_per_call, divergence_per_token : divergence → difference, for those of both.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> rows = SavedRows.of(q, p)
    >>> ratio = compare(replay(rows, "band:price=1"), replay(rows, "speculative")).tokens_ratio
    >>> print(f"{ratio.value:.3f} ± {ratio.standard_error:.3f} times the tokens")
    1.095 ± 0.052 times the tokens
    """

    tokens_per_call: Estimate
    accepted_per_call: Estimate
    tokens_ratio: Estimate
    divergence_per_call: dict[str, Estimate]
    divergence_per_token: dict[str, Estimate]


def compare(first: Replay, second: Replay) -> Comparison:
    """Return the first replay minus the second.

    Raises
    ------
    ValueError
        Replays of different traces.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> rows = SavedRows.of(q, p)
    >>> more = compare(replay(rows, "band:price=1"), replay(rows, "speculative")).accepted_per_call
    >>> round(more.value, 3)
    0.152
    """
    both = [spec for spec in first.spent if spec in second.spent]
    return Comparison(
        tokens_per_call=first.tokens_per_call - second.tokens_per_call,
        accepted_per_call=first.accepted_per_call - second.accepted_per_call,
        tokens_ratio=first.tokens_per_call / second.tokens_per_call,
        divergence_per_call={
            spec: first.divergence_per_call(spec) - second.divergence_per_call(spec)
            for spec in both
        },
        divergence_per_token={
            spec: first.divergence_per_token(spec) - second.divergence_per_token(spec)
            for spec in both
        },
    )


def tokens_at(replays: Sequence[Replay], level: float, divergence: str = "kl") -> Estimate:
    """Return tokens per call of a family at a divergence per token, between its two knobs there.

    Between two knobs stands the decode that takes either one for a whole cycle by a coin: its
    tokens and its divergence per call lie on the line between theirs. The coin is fitted
    anew with each text left out, so ``tokens_at(a, …) - tokens_at(b, …)`` is paired.

    Parameters
    ----------
    replays : at least two of the same trace, in any order.
    level : divergence per emitted token.

    Raises
    ------
    ValueError
        A level that the replays do not reach on both sides, replays of different traces.

    Examples
    --------
    >>> q = np.array([[0.2, 0.8], [0.5, 0.5], [0.3, 0.7]])
    >>> rows = SavedRows.of(q, np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]))
    >>> bands = [replay(rows, f"band:price={price}") for price in (0.5, 1, 2)]
    >>> round(tokens_at(bands, 0.02).value, 3)
    1.681
    """
    if len({own.source for own in replays}) > 1:
        raise ValueError("replays: must all be of the same trace; got several")
    ordered = sorted(replays, key=lambda own: own.divergence_per_token(divergence).value)
    spent = [own.divergence_per_token(divergence).value for own in ordered]
    for low, high in zip(range(len(ordered) - 1), range(1, len(ordered)), strict=True):
        if spent[low] <= level <= spent[high] and spent[low] < spent[high]:
            return _between(ordered[low], ordered[high], level, divergence)
    reach = f"{spent[0]:.4g} to {spent[-1]:.4g}" if spent else "nothing"
    raise ValueError(
        f"level: must lie between two of the replays' {divergence} per token, {reach}; got {level}"
    )


def _between(first: Replay, second: Replay, level: float, divergence: str) -> Estimate:
    tokens = first.tokens_per_call, second.tokens_per_call
    spent = first.divergence_per_call(divergence), second.divergence_per_call(divergence)
    whole = [np.array([one.value]) for one in (*tokens, *spent)]
    parts = [one.left_out for one in (*tokens, *spent)]
    return Estimate(float(_mixed(level, *whole)[0]), _mixed(level, *parts), first.source)


def _mixed(
    level: float,
    tokens_a: Float[np.ndarray, "some"],
    tokens_b: Float[np.ndarray, "some"],
    spent_a: Float[np.ndarray, "some"],
    spent_b: Float[np.ndarray, "some"],
) -> Float[np.ndarray, "some"]:
    """Return tokens per call of the coin between a and b that spends ``level`` a token."""
    over_a, over_b = spent_a - level * tokens_a, spent_b - level * tokens_b
    share = over_a / (over_a - over_b)
    return tokens_a + share * (tokens_b - tokens_a)
