"""How texts are decoded, and where they end."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

import cactus_theory as ct
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.registry import find_verifier

from .pair import MOST_TEXTS, TinyPair


@dataclass(frozen=True)
class Setting:
    """How texts are decoded.

    Attributes
    ----------
    policy : a Policy or its spec, or a tuple of K of them: one for each place of a round.
    num_draft_tokens : K ≥ 1; a round drafts fewer where fewer than K + 1 tokens have room.
    length : T ≥ 1, the most tokens of a text.
    verifier : its name, or a Verifier with an enumerated law.
    end : the token that ends a text, None for none.
    rules, judge : the policies (one, or K) and the verifier themselves.

    Raises
    ------
    ValueError
        Numbers below 1, an unknown policy or verifier, one that cannot follow the other,
        a number of policies that is not K.
    """

    policy: str | Policy | tuple[str | Policy, ...]
    num_draft_tokens: int
    length: int
    verifier: str | Verifier = "chain"
    end: int | None = None
    rules: tuple[Policy, ...] = field(init=False)
    judge: Verifier = field(init=False)

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1; got {getattr(self, name)!r}")
        policies = self.policy if isinstance(self.policy, tuple) else (self.policy,)
        if len(policies) not in (1, self.num_draft_tokens):
            raise ValueError(
                f"policy: must be one, or one for each of K = {self.num_draft_tokens} places; "
                f"got {len(policies)}"
            )
        rules = tuple(own if isinstance(own, Policy) else ct.policy(own) for own in policies)
        judge = find_verifier(self.verifier)
        for rule in rules:
            judge.check(rule)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "judge", judge)

    def check(self, pair: TinyPair) -> None:
        """Raise ValueError if the pair's texts cannot be enumerated so."""
        if pair.vocab**self.length > MOST_TEXTS:
            raise ValueError(
                f"length: at most 2^21 texts can be enumerated; got {pair.vocab}^{self.length}"
            )
        if self.end is not None and not 0 <= self.end < pair.vocab:
            raise ValueError(f"end: must be a token below {pair.vocab}; got {self.end!r}")

    def width(self, written: int) -> int:
        """Return how many tokens the loop drafts after ``written`` new ones."""
        return min(self.num_draft_tokens, self.length - written - 1)

    def unfinished(self, written: int, vocab: int) -> Bool[Tensor, "texts"]:
        """Return which of the V^t texts of t = ``written`` tokens get another one."""
        going = torch.full((1,), written < self.length)
        goes_on = torch.arange(vocab) != (-1 if self.end is None else self.end)
        for _ in range(written):
            going = (going[:, None] & goes_on).flatten()
        return going
