"""Two tiny models over one vocabulary, with a row for each state of the text."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check

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
