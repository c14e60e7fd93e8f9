r"""The same law by where the loop stands, token after token.

Given the text so far a decode is between rounds or i drafted tokens into one, so the next
token's law m_t is a mixture of the emitted laws there, and of the target's row where it is a
bonus. By the chain rule

.. math:: \mathrm{KL}(\text{text}‖q_{1:T}) = Σ_t \mathrm{E}[\mathrm{KL}(m_t‖q_t)]
          = Σ_t \mathrm{E}[\text{metered at } t] - Σ_t I(S_t; X_t \mid \text{text so far}),

with S_t where the loop stands and X_t the token (THEORY.md, Theorem 11).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from .pair import Setting, TinyPair
from .rounds import KL, Begun, Rounds, every_round

# divides by nothing where no decode can be
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Places:
    """What each token of a text costs, t = 1..T, in nats.

    Attributes
    ----------
    kl : E[KL(m_t‖q_t)]; they sum to the KL of the text.
    metered : the expected charge of the meter for token t.
    told : the mutual information of token t and of where the loop stands, given the text so
        far: ``metered − kl``, from the laws alone.
    """

    kl: list[float]
    metered: list[float]
    told: list[float]


@dataclass(frozen=True)
class Going:
    """Rounds under way at texts x: those that began ``place`` tokens ago.

    ``which`` (texts,) tells the round of each text at which they began, ``weight`` (texts,)
    the probability of a round beginning there.
    """

    rounds: Rounds
    which: Tensor
    weight: Float[Tensor, "texts"]
    place: int

    def next(self) -> Self:
        """Return the same rounds one accepted token later."""
        return type(self)(self.rounds, self.which, self.weight, self.place + 1)

    def mass(self) -> Float[Tensor, "texts"]:
        """Return the probability of being here, at each text."""
        return self._at(self.place)

    def law(self) -> Float[Tensor, "texts vocab"]:
        """Return the law of the next token."""
        return self.rounds.following[self.place][self.which].flatten(0, 1)

    def cost(self) -> Float[Tensor, "texts"]:
        """Return the meter's charge for the next token; the bonus is free."""
        if self.place == self.rounds.width:
            return torch.zeros_like(self.mass())
        return self.rounds.spent[self.place][self.which].flatten()

    def stopped(self) -> Float[Tensor, "longer"]:
        """Return the probability that the next token is each one, and ends the round."""
        emitted = (self.mass()[:, None] * self.law()).flatten()
        if self.place == self.rounds.width:
            return emitted
        return (emitted - self._at(self.place + 1)).clamp(min=0.0)

    def _at(self, place: int) -> Tensor:
        return (self.weight[:, None] * self.rounds.alive[place][self.which]).flatten()


def follow_places(pair: TinyPair, setting: Setting, begun: Sequence[Begun] | None = None) -> Places:
    """Return what each token costs, from how far verifiers get and what they emit next.

    Reads neither where a verifier stops nor what it draws there (``Rounds.ends``), from which
    :func:`~simulations.markov.texts.enumerate_texts` adds up texts. Parameters as there.

    Raises
    ------
    ValueError
        More than 2^21 texts, an end that is no token.
    """
    states = pair.prefixes(setting.length)
    starting = torch.ones(1, dtype=torch.float64)
    inside: list[Going] = []
    kl, metered, told = [], [], []
    for written, (rounds, which) in enumerate(begun or every_round(pair, setting)):
        starting = starting * setting.unfinished(written, pair.vocab)
        inside = [one.next() for one in inside if one.place < one.rounds.width]
        inside.append(Going(rounds, which, starting, 0))
        q = pair.target[states[written]]
        mixed = _mixture(inside)
        kl.append(_total(mixed.sum(-1), KL.value(_rows(mixed), q)))
        told.append(sum(_total(one.mass(), KL.value(one.law(), _rows(mixed))) for one in inside))
        metered.append(sum(_total(one.mass(), one.cost()) for one in inside))
        starting = torch.stack([one.stopped() for one in inside]).sum(0)
    return Places(kl, metered, told)


def _mixture(inside: Sequence[Going]) -> Float[Tensor, "texts vocab"]:
    """Return the probability of each text and next token, over all places a decode may be at."""
    return torch.stack([one.mass()[:, None] * one.law() for one in inside]).sum(0)


def _rows(mass: Float[Tensor, "texts vocab"]) -> Float[Tensor, "texts vocab"]:
    return mass / mass.sum(-1, keepdim=True).clamp(min=TINY)


def _total(mass: Tensor, value: Tensor) -> float:
    return float(torch.where(mass > 0, mass * value, 0.0).sum())
