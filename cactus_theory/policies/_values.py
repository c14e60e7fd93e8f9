"""What a drafted token is worth by the number of drafted tokens after it: a small table."""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.base.files import read_marked
from cactus_theory.optimum.soft import ONE_TOKEN, Worth

FORMAT = 1


@dataclass(frozen=True)
class ValueTable:
    """Slopes of φ by price and by the number of drafted tokens that follow.

    Attributes
    ----------
    divergence : spec of the divergence that the prices are of.
    knots : where slopes change, rising, the last one 1.
    prices : tokens per unit of divergence, rising.
    slopes : for each price, for 0, 1, … tokens that follow, the slopes up to each knot.
    file : where it was read from, as specs name it; tables of equal numbers are equal.
    """

    divergence: str
    knots: tuple[float, ...]
    prices: tuple[float, ...]
    slopes: tuple[tuple[tuple[float, ...], ...], ...]
    file: str = field(default="(learned)", compare=False)

    def __str__(self) -> str:
        return self.file

    @classmethod
    def of(
        cls,
        divergence: str,
        knots: Sequence[float],
        prices: Sequence[float],
        worths: Sequence[Sequence[Worth]],
    ) -> "ValueTable":
        """Return the table of these worths, by price and tokens that follow.

        Raises
        ------
        ValueError
            Knots or prices that do not rise, slopes that do not fall.
        """
        slopes = tuple(tuple(own.slopes for own in table) for table in worths)
        table = cls(divergence, tuple(map(float, knots)), tuple(prices), slopes)
        _check(table)
        return table

    def worths(self, price: float) -> tuple[Worth, ...]:
        """Return φ for 0, 1, … tokens that follow, interpolated between prices in their logarithm.

        Beyond the least and the largest price of the table, theirs is taken.
        """
        place = bisect(self.prices, price)
        if place in (0, len(self.prices)):
            return tuple(Worth(self.knots, own) for own in self.slopes[max(place - 1, 0)])
        below, above = self.prices[place - 1], self.prices[place]
        weight = math.log(price / below) / math.log(above / below)
        pairs = zip(self.slopes[place - 1], self.slopes[place], strict=True)
        return tuple(Worth(self.knots, _mixed(low, high, weight)) for low, high in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return what :func:`read_values` reads."""
        return {
            "format": FORMAT,
            "divergence": self.divergence,
            "knots": list(self.knots),
            "prices": list(self.prices),
            "slopes": [[list(own) for own in table] for table in self.slopes],
        }


# φ of one token now and nothing later, whatever the price
NO_VALUES = (ONE_TOKEN,)


def read_values(file: str) -> ValueTable:
    """Return the table in a JSON file, as it is now.

    Raises
    ------
    ValueError
        A file that cannot be read or holds no such table.
    """
    try:
        content = read_marked(Path(file), FORMAT)
    except (OSError, ValueError) as error:
        raise ValueError(f"values: {error}") from None
    try:
        slopes = tuple(tuple(tuple(map(float, own)) for own in rows) for rows in content["slopes"])
        knots, prices = (tuple(map(float, content[name])) for name in ("knots", "prices"))
        table = ValueTable(str(content["divergence"]), knots, prices, slopes, str(file))
        _check(table)
        if not table.slopes[0]:
            raise ValueError("slopes of no token")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"values: {file!r} must hold a table of values; got {error}") from None
    return table


def _check(table: ValueTable) -> None:
    knots, prices = table.knots, table.prices
    if not _rising((0.0, *knots)) or knots[-1:] != (1.0,):
        raise ValueError(f"knots that do not rise from above 0 to 1: {knots}")
    if not prices or not _rising((0.0, *prices)) or not math.isfinite(prices[-1] / prices[0]):
        raise ValueError(f"prices that do not rise from above 0: {prices}")
    if len(table.slopes) != len(prices) or len({len(rows) for rows in table.slopes}) != 1:
        raise ValueError("slopes that do not have as many tables as prices, all as long")
    for own in (own for rows in table.slopes for own in rows):
        if len(own) != len(knots) or not _rising((0.0, *own[::-1]), ties=True):
            raise ValueError(f"slopes that do not fall, one up to each knot: {own}")
        if not math.isfinite(own[0]):
            raise ValueError(f"slopes that are not finite: {own}")


def _rising(values: Sequence[float], ties: bool = False) -> bool:
    pairs = list(zip(values, values[1:], strict=False))
    return all(low < high or (ties and low == high) for low, high in pairs)


def _mixed(low: Sequence[float], high: Sequence[float], weight: float) -> tuple[float, ...]:
    return tuple((1 - weight) * a + weight * b for a, b in zip(low, high, strict=True))
