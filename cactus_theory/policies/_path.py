"""Where on a drafted path a row stands."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Path:
    """The path to each of some rows, for a verifier of whole blocks.

    Attributes
    ----------
    alive : (...) float64 in [0, 1], the alive ratio P: the tokens before the row are all
        accepted with the probability P given them (averaged over what was drafted later).
    left : (...) int64, how many drafted tokens are planned to follow the one that is drafted at
        the row. A draft that stops early by what it drafted does not change it, or h would
        depend on the drafted token.
    """

    alive: Float[Tensor, "*batch"]
    left: Int[Tensor, "*batch"]
