"""What a policy and a verifier did on a trace: sums by text, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from cactus_theory import _arguments as check
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.traces.estimate import Estimate, PerText, ratio_of_sums

SUMS = ("cycles", "tokens", "accepted", "reached", "kept")


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
        sums = {name: getattr(self, name)[..., own] for name in SUMS}
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
