"""The law of whole texts that a speculative decode emits, and what the decode takes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tests.markov.pair import Setting, TinyPair
from tests.markov.rounds import KL, Rounds, every_round


@dataclass(frozen=True)
class Moments:
    mean: float
    deviation: float


class Tally(NamedTuple):
    """Expected sums over decodes between two rounds, for each of some texts.

    Of 1, of the rounds so far and their square, and of the meter so far and its square.
    """

    mass: Float[Tensor, "texts"]
    calls: Float[Tensor, "texts"]
    calls_squared: Float[Tensor, "texts"]
    meter: Float[Tensor, "texts"]
    meter_squared: Float[Tensor, "texts"]

    def only(self, mask: Bool[Tensor, "texts"]) -> Self:
        return type(self)(*[torch.where(mask, values, 0.0) for values in self])

    def add(self, other: Self) -> None:
        for values, more in zip(self, other, strict=True):
            values.add_(more)

    def after(self, chance: Float[Tensor, "texts more"], cost: Float[Tensor, "texts more"]) -> Self:
        mass, calls, calls_squared, meter, meter_squared = (values[:, None] for values in self)
        longer = (
            mass * chance,
            (calls + mass) * chance,
            (calls_squared + 2 * calls + mass) * chance,
            (meter + mass * cost) * chance,
            (meter_squared + 2 * meter * cost + mass * cost**2) * chance,
        )
        return type(self)(*[values.flatten() for values in longer])


def moments(sums: Sequence[tuple[Tensor, Tensor]]) -> Moments:
    """Return the moments of a number whose sum and sum of squares come in parts.

    The deviation has half the digits of float64.
    """
    mean, square = (sum(float(part.sum()) for part in kind) for kind in zip(*sums, strict=True))
    return Moments(mean, math.sqrt(max(square - mean**2, 0.0)))


# largest |sum of all texts' probabilities − 1|: a million roundings
SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Texts:
    """The law of finished texts, and the means of a decode.

    ``law`` and ``target`` hold for t = 0..T the probability of each of V^t texts of t tokens as the
    decode emits it and under the target, the first token slowest. Without an end of text only the
    last has any.
    """

    law: list[Float[Tensor, "texts"]]
    target: list[Float[Tensor, "texts"]]
    tokens: float  # mean length of a text
    calls: Moments  # forward passes of the target
    meter: Moments  # Σ KL of the emitted law over verified rows, nats; the bonus is free

    @property
    def kl(self) -> float:
        return float(KL.value(torch.cat(self.law), torch.cat(self.target)))

    @property
    def total_variation(self) -> float:
        return float((torch.cat(self.law) - torch.cat(self.target)).abs().sum() / 2)

    @property
    def slack(self) -> float:
        """Return by how much the meter exceeds the KL."""
        return self.meter.mean - self.kl


def enumerate_texts(pair: TinyPair, setting: Setting) -> Texts:
    """Return the law of all texts, round after round as the decode loop goes.

    Exact but for rounding: each round's coins and drafts are integrated out by
    ``Verifier.law``, and a round begins at every text at which one can end. What texts cost must
    be finite: else the meter's moments are NaN.
    """
    vocab = pair.vocab
    empty = (torch.zeros(5, vocab**t, dtype=torch.float64) for t in range(setting.length + 1))
    tallies = [Tally(*sums) for sums in empty]
    tallies[0].mass[:] = 1.0
    for written, (rounds, index) in enumerate(every_round(pair, setting)):
        unfinished = tallies[written].only(setting.unfinished(written, vocab))
        for count, (chance, cost) in enumerate(_outcomes(rounds), 1):
            tallies[written + count].add(unfinished.after(chance[index], cost[index]))
    finished = [tally.only(~setting.unfinished(t, vocab)) for t, tally in enumerate(tallies)]
    sums = [float(tally.mass.sum()) for tally in finished]
    assert abs(sum(sums) - 1) < SUM_TOLERANCE
    return Texts(
        law=[tally.mass for tally in finished],
        target=target_law(pair, setting),
        tokens=sum(t * share for t, share in enumerate(sums)),
        calls=moments([(tally.calls, tally.calls_squared) for tally in finished]),
        meter=moments([(tally.meter, tally.meter_squared) for tally in finished]),
    )


def target_law(pair: TinyPair, setting: Setting) -> list[Float[Tensor, "texts"]]:
    laws, mass = [], torch.ones(1, dtype=torch.float64)
    for written, states in enumerate(pair.prefixes(setting.length)):
        going = setting.unfinished(written, pair.vocab)
        laws.append(mass * ~going)
        mass = ((mass * going)[:, None] * pair.target[states]).flatten()
    return laws


def _outcomes(rounds: Rounds) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for i = 1..w + 1 tokens: probability of emitting them, and what the meter charges."""
    vocab = rounds.following[0].shape[-1]
    cost = torch.zeros_like(rounds.alive[0])
    for place, chance in enumerate(rounds.ends):
        if place < rounds.width:
            cost = cost + rounds.charges[place]
        cost = cost.repeat_interleave(vocab, 1)
        yield chance, cost
