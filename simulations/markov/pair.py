"""Two tiny models over one vocabulary, a row for each state of the text, and how they decode."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier, find_verifier

# most texts of one length that are held at once: 6^8 fit
MOST_TEXTS = 2**21


@dataclass(frozen=True)
class TinyPair:
    """A target and a draft whose next row depends on one of S states of the text.

    In a Markov model the state is the last tokens. Any two models are such a pair if every
    prefix of a text is a state of its own. ValueError for rows that are not distributions, shapes
    that differ, states that are not there.
    """

    target: Float[Tensor, "states vocab"]  # float64
    draft: Float[Tensor, "states vocab"]
    following: Int[Tensor, "states vocab"]  # the state after each token
    start: int = 0  # the state before the first token

    def __post_init__(self) -> None:
        shape = tuple(self.target.shape)
        for name in ("target", "draft"):
            check.check_probabilities(name, getattr(self, name))
        for name in ("draft", "following"):
            other = tuple(getattr(self, name).shape)
            if other != shape:
                raise ValueError(f"{name}: must have the target's shape {shape}; got {other}")
        for name, value in (("following", self.following), ("start", torch.tensor(self.start))):
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= shape[0]:
                raise ValueError(
                    f"{name}: must be states from 0 to {shape[0] - 1}; got {low} to {high}"
                )

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    def prefixes(self, length: int) -> list[Int[Tensor, "texts"]]:
        """Return for t = 0..length the states after all V^t texts, the first token slowest."""
        states = [torch.tensor([self.start])]
        for _ in range(length):
            states.append(self.following[states[-1]].flatten())
        return states


def markov_pair(
    vocab: int,
    *,
    order: int = 1,
    seed: int = 0,
    sharpness: float = 1.0,
    distance: float = 1.0,
    zeros: float = 0.0,
) -> TinyPair:
    """Return random Markov models of V ≥ 2 tokens; the text before the first counts as token 0.

    The next row depends on the last ``order`` tokens. ``sharpness`` is the standard deviation of
    the target's logits, 0 for uniform rows, ``distance`` that of what is added to them for the
    draft, 0 for the same model. An entry of a row is 0 with probability ``zeros``, in each model
    by itself; a row keeps its likeliest token. One generator draws both models. ValueError for an
    argument outside its range, or more than 2^21 states.
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
    rows = rows.masked_fill(lost, 0.0)
    return rows / rows.sum(-1, keepdim=True)


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
    """The policies, verifier, K and lengths of enumerated decodes.

    A round drafts K tokens, fewer where fewer than K + 1 have room. ValueError for numbers below
    1, an unknown policy or verifier, one that cannot follow the other, a number of policies that
    is neither 1 nor K.
    """

    policy: str | Policy | tuple[str | Policy, ...]  # one, or one for each of K places of a round
    num_draft_tokens: int
    length: int  # T, the most tokens of a text
    verifier: str | Verifier = "chain"  # one whose law is enumerated
    end: int | None = None  # the token that ends a text
    policies: tuple[Policy, ...] = field(init=False)
    judge: Verifier = field(init=False)

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1; got {getattr(self, name)!r}")
        specs = self.policy if isinstance(self.policy, tuple) else (self.policy,)
        if len(specs) not in (1, self.num_draft_tokens):
            raise ValueError(
                f"policy: must be one, or one for each of K = {self.num_draft_tokens} places; "
                f"got {len(specs)}"
            )
        policies = tuple(spec if isinstance(spec, Policy) else ct.policy(spec) for spec in specs)
        judge = find_verifier(self.verifier)
        for policy in policies:
            judge.check(policy)
        object.__setattr__(self, "policies", policies)
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
        """Return the number of tokens that the loop drafts after ``written`` new ones."""
        return min(self.num_draft_tokens, self.length - written - 1)

    def unfinished(self, written: int, vocab: int) -> Bool[Tensor, "texts"]:
        going = torch.full((1,), written < self.length)
        goes_on = torch.arange(vocab) != (-1 if self.end is None else self.end)
        for _ in range(written):
            going = (going[:, None] & goes_on).flatten()
        return going
