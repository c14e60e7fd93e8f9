r"""The law of whole texts that a speculative decode emits, and what the decode takes.

Then the same law by where the loop stands, token after token. Given the text so far a decode is
between rounds or i drafted tokens into one, so the next token's law m_t is a mixture of the
emitted laws there, and of the target's row where it is a bonus. By the chain rule

.. math:: \mathrm{KL}(\text{text}‖q_{1:T}) = Σ_t \mathrm{E}[\mathrm{KL}(m_t‖q_t)]
          = Σ_t \mathrm{E}[\text{metered at } t] - Σ_t I(S_t; X_t \mid \text{text so far}),

with S_t where the loop stands and X_t the token (THEORY.md, Theorem 11).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .pair import Setting, TinyPair
from .rounds import KL, Begun, Rounds, every_round


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of a number that every decode has."""

    mean: float
    deviation: float


@dataclass
class Tally:
    """Expected sums over decodes between two rounds, for each of some texts.

    Of 1, of the rounds so far and their square, and of the meter so far and its square.
    """

    mass: Float[Tensor, "texts"]
    calls: Float[Tensor, "texts"]
    calls_squared: Float[Tensor, "texts"]
    spent: Float[Tensor, "texts"]
    spent_squared: Float[Tensor, "texts"]

    @classmethod
    def nothing(cls, texts: int) -> Self:
        """Return zeros."""
        return cls(*torch.zeros(5, texts, dtype=torch.float64))

    def only(self, chosen: Bool[Tensor, "texts"]) -> Self:
        """Return the same with zeros at all other texts."""
        return type(self)(*[torch.where(chosen, part, 0.0) for part in vars(self).values()])

    def add(self, other: Self) -> None:
        """Add another tally of the same texts."""
        for name, part in vars(self).items():
            part.add_(getattr(other, name))

    def after(self, chance: Float[Tensor, "texts more"], cost: Float[Tensor, "texts more"]) -> Self:
        """Return what one round leaves at each longer text, given its probability and cost."""
        mass, calls, squared, spent, spent_squared = (part[:, None] for part in vars(self).values())
        parts = (
            mass * chance,
            (calls + mass) * chance,
            (squared + 2 * calls + mass) * chance,
            (spent + _times(mass, cost)) * chance,
            (spent_squared + 2 * _times(spent, cost) + _times(mass, cost**2)) * chance,
        )
        return type(self)(*[part.nan_to_num(nan=0.0, posinf=torch.inf).flatten() for part in parts])


def moments(sums: Sequence[tuple[Tensor, Tensor]]) -> Moments:
    """Return the moments of a number whose sum and sum of squares come in parts.

    The deviation has half the digits of float64, and is NaN where the mean is infinite.
    """
    mean, square = (sum(float(part.sum()) for part in parts) for parts in zip(*sums, strict=True))
    if not math.isfinite(mean):
        return Moments(mean, math.nan)
    return Moments(mean, math.sqrt(max(square - mean**2, 0.0)))


def _times(mass: Tensor, cost: Tensor) -> Tensor:
    """Return the product, 0 where the mass is: nobody pays an infinite cost there."""
    return torch.where(mass > 0, mass * cost, 0.0)


# how far the probabilities of all texts may be from 1 in sum: a million roundings
SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Texts:
    """The law of finished texts, and the means of a decode.

    Attributes
    ----------
    law, target : for t = 0..T (V^t,), the probability of each text of t tokens as the decode
        emits it and under the target, the first token slowest. Without an end of text only
        the last has any.
    tokens : mean length of a text.
    calls : forward passes of the target.
    meter : Σ KL of the emitted law over verified rows, nats; the bonus is free.
    """

    law: list[Float[Tensor, "texts"]]
    target: list[Float[Tensor, "texts"]]
    tokens: float
    calls: Moments
    meter: Moments

    @property
    def tokens_per_call(self) -> float:
        """Return mean tokens over mean calls, which long runs of decodes tend to."""
        return self.tokens / self.calls.mean

    @property
    def kl(self) -> float:
        """Return KL(text‖target's text) in nats."""
        return float(KL.value(torch.cat(self.law), torch.cat(self.target)))

    @property
    def total_variation(self) -> float:
        """Return half the absolute difference of the two laws."""
        return float((torch.cat(self.law) - torch.cat(self.target)).abs().sum() / 2)

    @property
    def slack(self) -> float:
        """Return by how much the meter exceeds the KL; NaN where both are infinite."""
        return self.meter.mean - self.kl


def enumerate_texts(
    pair: TinyPair, setting: Setting, begun: Sequence[Begun] | None = None
) -> Texts:
    """Return the law of all texts, round after round as the decode loop goes.

    Exact but for rounding: each round's coins and drafts are integrated out by
    ``Verifier.law``, and a round begins at every text at which one can end.

    Parameters
    ----------
    pair, setting : what is decoded, and how.
    begun : the rounds of :func:`~simulations.markov.rounds.every_round`, if they are known.

    Raises
    ------
    ValueError
        More than 2^21 texts, an end that is no token.
    RuntimeError
        Probabilities that do not sum to 1.
    """
    vocab = pair.vocab
    begun = every_round(pair, setting) if begun is None else begun
    tallies = [Tally.nothing(vocab**t) for t in range(setting.length + 1)]
    tallies[0].mass[:] = 1.0
    for written, (rounds, which) in enumerate(begun):
        here = tallies[written].only(setting.unfinished(written, vocab))
        for count, (chance, cost) in enumerate(_outcomes(rounds), 1):
            tallies[written + count].add(here.after(chance[which], cost[which]))
    done = [tally.only(~setting.unfinished(t, vocab)) for t, tally in enumerate(tallies)]
    sums = [float(tally.mass.sum()) for tally in done]
    if not abs(sum(sums) - 1) < SUM_TOLERANCE:
        raise RuntimeError(f"texts: probabilities must sum to 1; got {sum(sums)!r}")
    return Texts(
        law=[tally.mass for tally in done],
        target=target_law(pair, setting),
        tokens=sum(t * share for t, share in enumerate(sums)),
        calls=moments([(tally.calls, tally.calls_squared) for tally in done]),
        meter=moments([(tally.spent, tally.spent_squared) for tally in done]),
    )


def target_law(pair: TinyPair, setting: Setting) -> list[Float[Tensor, "texts"]]:
    """Return the target's own law of finished texts, as in ``Texts``."""
    found, mass = [], torch.ones(1, dtype=torch.float64)
    for written, states in enumerate(pair.prefixes(setting.length)):
        going = setting.unfinished(written, pair.vocab)
        found.append(mass * ~going)
        mass = ((mass * going)[:, None] * pair.target[states]).flatten()
    return found


def _outcomes(rounds: Rounds) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for i = 1..w + 1 tokens: probability of emitting them, and what the meter charges."""
    vocab = rounds.following[0].shape[-1]
    cost = torch.zeros_like(rounds.alive[0])
    for place, chance in enumerate(rounds.ends):
        if place < rounds.width:
            cost = cost + rounds.spent[place]
        cost = cost.repeat_interleave(vocab, 1)
        yield chance, cost


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
