"""Two tiny models over one vocabulary, a row for each state of the text, and how they decode."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import cactus_theory as ct
from cactus_theory.policies import Policy
from cactus_theory.verify.contract import Verifier, find_verifier


@dataclass(frozen=True)
class TinyPair:
    """A target and a draft whose next row depends on one of S states of the text.

    In a Markov model the state is the last tokens. Any two models are such a pair if every
    prefix of a text is a state of its own.
    """

    target: Float[Tensor, "states vocab"]  # float64
    draft: Float[Tensor, "states vocab"]
    following: Int[Tensor, "states vocab"]  # the state after each token
    start: int = 0  # the state before the first token

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
    distance: float = 1.0,
    zeros: float = 0.0,
) -> TinyPair:
    """Return random Markov models of V ≥ 2 tokens; the text before the first counts as token 0.

    The next row depends on the last ``order`` tokens. ``distance`` is the standard deviation of
    what is added to the target's logits for the draft. An entry of a row is 0 with probability
    ``zeros``, in each model by itself; a row keeps its likeliest token.
    """
    states = vocab**order
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(states, vocab, generator=generator, dtype=torch.float64)

    logits = noise()
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


@dataclass(frozen=True)
class Setting:
    """The policies, verifier, K and lengths of enumerated decodes.

    A round drafts K tokens, fewer where fewer than K + 1 have room.
    """

    policy: str | Policy | tuple[str | Policy, ...]  # one, or one for each of K places of a round
    num_draft_tokens: int
    length: int  # T, the most tokens of a text
    verifier: str | Verifier = "chain"  # one whose law is enumerated
    end: int | None = None  # the token that ends a text
    policies: tuple[Policy, ...] = field(init=False)
    judge: Verifier = field(init=False)

    def __post_init__(self) -> None:
        specs = self.policy if isinstance(self.policy, tuple) else (self.policy,)
        object.__setattr__(self, "policies", tuple(map(ct.policy, specs)))
        object.__setattr__(self, "judge", find_verifier(self.verifier))

    def width(self, written: int) -> int:
        """Return the number of tokens that the loop drafts after ``written`` new ones."""
        return min(self.num_draft_tokens, self.length - written - 1)

    def unfinished(self, written: int, vocab: int) -> Bool[Tensor, "texts"]:
        going = torch.full((1,), written < self.length)
        goes_on = torch.arange(vocab) != (-1 if self.end is None else self.end)
        for _ in range(written):
            going = (going[:, None] & goes_on).flatten()
        return going
