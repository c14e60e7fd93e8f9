r"""The law of whole texts by where the loop stands, token after token.

Given the text so far a decode is between rounds or i drafted tokens into one, so the next token's
law m_t is a mixture of the emitted laws there, and of the target's row where it is a bonus. By the
chain rule

.. math:: \mathrm{KL}(\text{text}‖q_{1:T}) = Σ_t \mathrm{E}[\mathrm{KL}(m_t‖q_t)]
          = Σ_t \mathrm{E}[\text{metered at } t] - Σ_t I(S_t; X_t \mid \text{text so far}),

with S_t where the loop stands and X_t the token (THEORY.md, Theorem 11).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tests.markov.pair import Setting, TinyPair
from tests.markov.rounds import KL, Rounds, every_round

# divides by nothing where no decode can be
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Places:
    """What each token of a text costs, t = 1..T, in nats.

    ``information`` is the mutual information of token t and of where the loop stands, given the
    text so far: ``metered − kl``, from the laws alone.
    """

    kl: list[float]  # E[KL(m_t‖q_t)]; they sum to the KL of the text
    metered: list[float]  # the expected charge of the meter for token t
    information: list[float]


@dataclass(frozen=True)
class OpenRounds:
    """Rounds under way at texts x: those that began ``place`` tokens ago."""

    rounds: Rounds
    index: Tensor  # (texts,), the round of each text at which they began
    weight: Float[Tensor, "texts"]  # the probability of a round beginning there
    place: int

    def mass(self) -> Float[Tensor, "texts"]:
        """Return the probability of being here, at each text."""
        return self._at(self.place)

    def law(self) -> Float[Tensor, "texts vocab"]:
        return self.rounds.following[self.place][self.index].flatten(0, 1)

    def cost(self) -> Float[Tensor, "texts"]:
        """Return the meter's charge for the next token; the bonus is free."""
        if self.place == self.rounds.width:
            return torch.zeros_like(self.mass())
        return self.rounds.charges[self.place][self.index].flatten()

    def stopped(self) -> Float[Tensor, "longer"]:
        """Return the probability that the next token is each one, and ends the round."""
        emitted = (self.mass()[:, None] * self.law()).flatten()
        if self.place == self.rounds.width:
            return emitted
        return (emitted - self._at(self.place + 1)).clamp(min=0.0)

    def _at(self, place: int) -> Tensor:
        return (self.weight[:, None] * self.rounds.alive[place][self.index]).flatten()


def follow_places(pair: TinyPair, setting: Setting) -> Places:
    """Return what each token costs, from how far verifiers get and what they emit next.

    Reads neither where a verifier stops nor what it draws there (``Rounds.ends``), from which
    ``enumerate_texts`` adds up texts.
    """
    states = pair.prefixes(setting.length)
    weight = torch.ones(1, dtype=torch.float64)
    under_way: list[OpenRounds] = []
    kl, metered, information = [], [], []
    for written, (rounds, index) in enumerate(every_round(pair, setting)):
        weight = weight * setting.unfinished(written, pair.vocab)
        under_way = [
            replace(part, place=part.place + 1)
            for part in under_way
            if part.place < part.rounds.width
        ]
        under_way.append(OpenRounds(rounds, index, weight, 0))
        q = pair.target[states[written]]
        # of each text and next token, over all places a decode may be at
        mass = torch.stack([part.mass()[:, None] * part.law() for part in under_way]).sum(0)
        mixture = mass / mass.sum(-1, keepdim=True).clamp(min=TINY)
        kl.append(_total(mass.sum(-1), KL.value(mixture, q)))
        gains = [_total(part.mass(), KL.value(part.law(), mixture)) for part in under_way]
        information.append(sum(gains))
        metered.append(sum(_total(part.mass(), part.cost()) for part in under_way))
        weight = torch.stack([part.stopped() for part in under_way]).sum(0)
    return Places(kl, metered, information)


def _total(mass: Tensor, value: Tensor) -> float:
    return float(torch.where(mass > 0, mass * value, 0.0).sum())
