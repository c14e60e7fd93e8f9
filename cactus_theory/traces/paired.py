"""Compare replays of the same cycles: paired differences, and levels at equal divergence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.traces.estimate import Estimate, Replay, combined


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


def tokens_at(
    replays: Sequence[Replay], level: float | Estimate, divergence: str = "kl"
) -> Estimate:
    """Return tokens per call of a family at a divergence per token, between its two knobs there.

    Between two knobs stands the decode that takes either one for a whole cycle by a coin: its
    tokens and its divergence per call lie on the line between theirs. The coin is fitted
    anew with each text left out, so ``tokens_at(a, …) - tokens_at(b, …)`` is paired.

    Parameters
    ----------
    replays : at least two of the same trace, in any order.
    level : divergence per emitted token; one that was estimated on the same texts, as
        another replay's, is paired with them.

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
    names = "level", f"{divergence} per token"
    return _between(
        replays, lambda own: own.divergence_per_token(divergence), level, names, _mixed, divergence
    )


def divergence_at(
    replays: Sequence[Replay], tokens: float | Estimate, divergence: str = "kl"
) -> Estimate:
    """Return the divergence per token of a family at so many tokens per call.

    Between two knobs, and paired, as :func:`tokens_at`.

    Raises
    ------
    ValueError
        Tokens per call that the replays do not reach on both sides, replays of different traces.

    Examples
    --------
    >>> q = np.array([[0.2, 0.8], [0.5, 0.5], [0.3, 0.7]])
    >>> rows = SavedRows.of(q, np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]))
    >>> bands = [replay(rows, f"band:price={price}") for price in (0.5, 1, 2)]
    >>> round(divergence_at(bands, 1.681).value, 3)
    0.02
    """
    names = "tokens", "tokens per call"
    return _between(replays, lambda own: own.tokens_per_call, tokens, names, _spent, divergence)


def _between(
    replays: Sequence[Replay],
    measure: Callable[[Replay], Estimate],
    given: float | Estimate,
    names: tuple[str, str],
    rule: Callable[..., Any],
    divergence: str,
) -> Estimate:
    """Return ``rule`` of what is given and of the replays that measure next to it on both sides."""
    ordered = sorted(replays, key=lambda own: measure(own).value)
    values = [measure(own).value for own in ordered]
    amount = given.value if isinstance(given, Estimate) else given
    if len({own.source for own in ordered}) > 1:
        raise ValueError("replays: must all be of the same trace; got several")
    for low, high, less, more in zip(ordered, ordered[1:], values, values[1:], strict=False):
        if less <= amount <= more and less < more:
            if not isinstance(given, Estimate):
                given = Estimate(given, np.full(len(low.cycles), float(given)), low.source)
            numbers = [own.tokens_per_call for own in (low, high)]
            numbers += [own.divergence_per_call(divergence) for own in (low, high)]
            return combined(rule, given, *numbers)
    name, unit = names
    reach = f"{values[0]:.4g} to {values[-1]:.4g}" if values else "nothing"
    raise ValueError(f"{name}: must lie between two of the replays' {unit}, {reach}; got {amount}")


def _mixed(level: Any, tokens_a: Any, tokens_b: Any, spent_a: Any, spent_b: Any) -> Any:
    """Return tokens per call of the coin between a and b that spends ``level`` a token."""
    over_a, over_b = spent_a - level * tokens_a, spent_b - level * tokens_b
    share = over_a / (over_a - over_b)
    return tokens_a + share * (tokens_b - tokens_a)


def _spent(tokens: Any, tokens_a: Any, tokens_b: Any, spent_a: Any, spent_b: Any) -> Any:
    """Return the divergence per token of the coin between a and b that has so many tokens."""
    share = (tokens - tokens_a) / (tokens_b - tokens_a)
    return (spent_a + share * (spent_b - spent_a)) / tokens
