"""Numbers with standard errors that count texts, not cycles: the cycles of a text are alike."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

PerText = Float[np.ndarray, "texts"]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number computed from texts, by the jackknife over them.

    The difference and the ratio of two estimates from the same texts are estimates too: their
    errors are those of paired texts.

    Attributes
    ----------
    value : from all texts.
    left_out : (T,), from all texts but one.
    source : what the texts are from.

    Examples
    --------
    >>> first = Estimate(3.0, np.array([2.9, 3.0, 3.1]), "three texts")
    >>> second = Estimate(2.0, np.array([1.9, 2.1, 2.0]), "three texts")
    >>> round(first.standard_error, 4), round((first - second).standard_error, 4)
    (0.1155, 0.1155)
    """

    value: float
    left_out: PerText
    source: str

    @property
    def standard_error(self) -> float:
        """Return the jackknife's, NaN for one text or a number that is not finite."""
        count = len(self.left_out)
        if count < 2 or not np.isfinite(self.left_out).all():
            return float("nan")
        around = self.left_out - self.left_out.mean()
        return float(np.sqrt((count - 1) / count * (around**2).sum()))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """Return the paired difference.

        Raises
        ------
        ValueError
            Estimates from different texts.
        """
        self._check(other)
        return Estimate(self.value - other.value, self.left_out - other.left_out, self.source)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the paired ratio.

        Raises
        ------
        ValueError
            Estimates from different texts.
        """
        self._check(other)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(np.float64(self.value) / other.value)
            return Estimate(value, self.left_out / other.left_out, self.source)

    def _check(self, other: "Estimate") -> None:
        if self.source != other.source or len(self.left_out) != len(other.left_out):
            raise ValueError(
                f"estimates: must be from the same texts to be paired; got {len(self.left_out)} "
                f"and {len(other.left_out)} texts of different sources"
            )


def ratio_of_sums(above: PerText, below: PerText, source: str) -> Estimate:
    """Return Σ above / Σ below over texts, NaN where nothing is below."""
    tops, bottoms = np.float64(above.sum()), np.float64(below.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(float(tops / bottoms), _all_but_one(above) / _all_but_one(below), source)


def _all_but_one(values: PerText) -> PerText:
    """Return the sum over all other entries; not by subtraction, which fails at infinity."""
    before = np.concatenate([[0.0], values[:-1].cumsum()])
    after = np.concatenate([values[:0:-1].cumsum()[::-1], [0.0]])
    return before + after
