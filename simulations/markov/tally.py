"""Sums over decodes at each text: how many there are, their calls and their meter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
