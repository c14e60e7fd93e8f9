"""What a decode did on a trace, with errors that count texts: the cycles of a text are alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from cactus_theory.base import arguments as check
from cactus_theory.divergences import divergence as find_divergence

PerText = Float[np.ndarray, "texts"]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number computed from texts, by the jackknife over them.

    The difference and the ratio of two estimates from the same texts are estimates too: their
    errors are those of paired texts.

    Attributes
    ----------
    value : from all texts.
    left_out : (T,), from all texts but one.
    source : what the texts are from.

    Examples
    --------
    >>> first = Estimate(3.0, np.array([2.9, 3.0, 3.1]), "three texts")
    >>> second = Estimate(2.0, np.array([1.9, 2.1, 2.0]), "three texts")
    >>> round(first.standard_error, 4), round((first - second).standard_error, 4)
    (0.1155, 0.1155)
    """

    value: float
    left_out: PerText
    source: str

    @property
    def standard_error(self) -> float:
        """Return the jackknife's, NaN for one text or a number that is not finite."""
        count = len(self.left_out)
        if count < 2 or not np.isfinite(self.left_out).all():
            return float("nan")
        around = self.left_out - self.left_out.mean()
        return float(np.sqrt((count - 1) / count * (around**2).sum()))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """Return the paired difference.

        Raises
        ------
        ValueError
            Estimates from different texts.
        """
        return combined(np.subtract, self, other)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the paired ratio.

        Raises
        ------
        ValueError
            Estimates from different texts.
        """
        return combined(np.divide, self, other)


def combined(rule: Callable[..., Any], first: Estimate, *others: Estimate) -> Estimate:
    """Return ``rule`` of numbers from the same texts: from all of them and with each left out.

    Raises
    ------
    ValueError
        Estimates from different texts.
    """
    count = len(first.left_out)
    for other in others:
        if first.source != other.source or count != len(other.left_out):
            raise ValueError(
                f"estimates: must be from the same texts to be paired; got {count} and "
                f"{len(other.left_out)} texts of different sources"
            )
    every = first, *others
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(rule(*(np.float64(own.value) for own in every)))
        return Estimate(value, rule(*(own.left_out for own in every)), first.source)


def ratio_of_sums(above: PerText, below: PerText, source: str) -> Estimate:
    """Return Σ above / Σ below over texts, NaN where nothing is below."""
    tops, bottoms = np.float64(above.sum()), np.float64(below.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(float(tops / bottoms), _all_but_one(above) / _all_but_one(below), source)


def _all_but_one(values: PerText) -> PerText:
    """Return the sum over all other entries; not by subtraction, which fails at infinity."""
    before = np.concatenate([[0.0], values[:-1].cumsum()])
    after = np.concatenate([values[:0:-1].cumsum()[::-1], [0.0]])
    return before + after


@dataclass(frozen=True, eq=False)
class Replay:
    """What a policy and a verifier do on a trace.

    Attributes
    ----------
    policy, verifier : their specs.
    num_draft_tokens : K, the most tokens of a draft that were used.
    source : fingerprint of the trace.
    cycles, tokens, accepted : (T,) sums over each text's cycles of 1, of the expected tokens
        of a call, and of the drafted ones among them.
    spent : divergence → (T,), the expected metered divergence (nats for KL).
    reached, kept : (K, T), how often place i of a draft is expected to be decided, and kept.

    Examples
    --------
    >>> q, p = np.array([[0.2, 0.8], [0.5, 0.5]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> seen = replay(SavedRows.of(q, p), "band:price=1")
    >>> seen.name
    'band:price=1.0, chain, K=1'
    >>> round(seen.tokens_per_call.value, 3), round(seen.divergence_per_token().value, 4)
    (1.752, 0.0369)
    """

    policy: str
    verifier: str
    num_draft_tokens: int
    source: str
    cycles: PerText
    tokens: PerText
    accepted: PerText
    spent: dict[str, PerText]
    reached: Float[np.ndarray, "K texts"]
    kept: Float[np.ndarray, "K texts"]

    @property
    def name(self) -> str:
        """Return policy, verifier and K as tables show them."""
        return f"{self.policy}, {self.verifier}, K={self.num_draft_tokens}"

    @cached_property
    def tokens_per_call(self) -> Estimate:
        """Return new tokens per target call, recovered and bonus tokens included."""
        return ratio_of_sums(self.tokens, self.cycles, self.source)

    @cached_property
    def accepted_per_call(self) -> Estimate:
        """Return accepted drafted tokens per target call."""
        return ratio_of_sums(self.accepted, self.cycles, self.source)

    @cached_property
    def acceptance_by_position(self) -> tuple[Estimate, ...]:
        """Return, for each place in a draft, the share of tokens kept among those reached."""
        pairs = zip(self.kept, self.reached, strict=True)
        return tuple(ratio_of_sums(kept, reached, self.source) for kept, reached in pairs)

    def part(self, texts: Sequence[int]) -> "Replay":
        """Return what it does on some of the texts; parts of the same texts can be paired."""
        own = np.array(texts, dtype=np.int64)
        every = {one.name: getattr(self, one.name) for one in fields(self)}
        sums = {name: one[..., own] for name, one in every.items() if isinstance(one, np.ndarray)}
        spent = {spec: values[own] for spec, values in self.spent.items()}
        return replace(self, source=f"{self.source} {own.tolist()}", spent=spent, **sums)

    def divergence_per_call(self, divergence: str = "kl") -> Estimate:
        """Return the metered divergence per target call."""
        return ratio_of_sums(self._spent(divergence), self.cycles, self.source)

    def divergence_per_token(self, divergence: str = "kl") -> Estimate:
        """Return the metered divergence per emitted token."""
        return ratio_of_sums(self._spent(divergence), self.tokens, self.source)

    def _spent(self, divergence: str) -> PerText:
        spec = find_divergence(divergence).spec
        return self.spent[check.one_of("divergence", spec, tuple(self.spent))]
