"""Two tiny models over one vocabulary, a row for each state of the text, and how they decode."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier, find_verifier

# texts of one length that are held at once: 6^8 fit
MOST_TEXTS = 2**21


@dataclass(frozen=True)
class TinyPair:
    """A target and a draft whose next row depends on one of S states of the text.

    In a Markov model the state is the last tokens. Any two models are such a pair if every
    prefix of a text is a state of its own.

    Attributes
    ----------
    target, draft : (S, V) float64 rows q and p of each state.
    following : (S, V) int64, the state after each token.
    start : the state before the first token.

    Raises
    ------
    ValueError
        Rows that are not distributions, shapes that differ, states that are not there.
    """

    target: Float[Tensor, "states vocab"]
    draft: Float[Tensor, "states vocab"]
    following: Int[Tensor, "states vocab"]
    start: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.target.shape)
        for name in ("target", "draft"):
            check.check_probabilities(name, getattr(self, name))
        for name in ("draft", "following"):
            own = tuple(getattr(self, name).shape)
            if own != shape:
                raise ValueError(f"{name}: must have the target's shape {shape}; got {own}")
        for name, value in (("following", self.following), ("start", torch.tensor(self.start))):
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= shape[0]:
                raise ValueError(
                    f"{name}: must be states from 0 to {shape[0] - 1}; got {low} to {high}"
                )

    @property
    def vocab(self) -> int:
        """Return V."""
        return self.target.shape[1]

    def prefixes(self, length: int) -> list[Int[Tensor, "texts"]]:
        """Return for t = 0..length the states after all V^t texts, the first token slowest."""
        found = [torch.tensor([self.start])]
        for _ in range(length):
            found.append(self.following[found[-1]].flatten())
        return found


def markov_pair(
    vocab: int,
    *,
    order: int = 1,
    seed: int = 0,
    sharpness: float = 1.0,
    distance: float = 1.0,
    zeros: float = 0.0,
) -> TinyPair:
    """Return random Markov models; the text before the first token counts as token 0.

    Parameters
    ----------
    vocab : V ≥ 2.
    order : the next row depends on the last ``order`` tokens, at least 1.
    seed : of the one generator that draws both models.
    sharpness : standard deviation of the target's logits, 0 for uniform rows.
    distance : standard deviation of what is added to them for the draft, 0 for the same model.
    zeros : probability that an entry of a row is 0, in each model by itself; a row keeps its
        likeliest token. In [0, 1].

    Raises
    ------
    ValueError
        An argument outside its range, or more than 2^21 states.
    """
    _check(vocab, order, sharpness=sharpness, distance=distance, zeros=zeros)
    states = vocab**order
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(states, vocab, generator=generator, dtype=torch.float64)

    logits = sharpness * noise()
    rows = [logits.softmax(-1), (logits + distance * noise()).softmax(-1)]
    if zeros:
        rows = [_with_zeros(row, zeros, generator) for row in rows]
    following = torch.arange(states * vocab).reshape(states, vocab) % states
    return TinyPair(rows[0], rows[1], following)


def _with_zeros(
    rows: Float[Tensor, "states vocab"], share: float, generator: torch.Generator
) -> Float[Tensor, "states vocab"]:
    lost = torch.rand(rows.shape, generator=generator, dtype=torch.float64) < share
    lost.scatter_(1, rows.argmax(-1, keepdim=True), False)
    kept = rows.masked_fill(lost, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _check(vocab: int, order: int, **dials: float) -> None:
    if vocab < 2:
        raise ValueError(f"vocab: must be at least 2; got {vocab!r}")
    if order < 1 or vocab**order > MOST_TEXTS:
        raise ValueError(f"order: must be at least 1, with vocab^order ≤ 2^21; got {order!r}")
    for name, value in dials.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}: must be at least 0 and finite; got {value!r}")
    if dials["zeros"] > 1:
        raise ValueError(f"zeros: must be at most 1; got {dials['zeros']!r}")


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
