"""Rows on a drafted path, for verifiers of whole blocks."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.policies._residual import Residual


@dataclass(frozen=True)
class Path:
    """The path to each of some rows.

    Attributes
    ----------
    alive : (...) float64 in [0, 1], the alive ratio P: the tokens before the row are all
        accepted with the probability P given them (averaged over what was drafted later).
    left : (...) int64, how many drafted tokens follow the one that is drafted at the row.
    """

    alive: Float[Tensor, "*batch"]
    left: Int[Tensor, "*batch"]


@dataclass(frozen=True)
class Step:
    """What a policy's row h makes of N nodes and the tokens drafted there.

    Attributes
    ----------
    ratio : (N,) float64, P h_n/p_n; the alive ratio after the token is min(1, ratio).
    residual : of (P h − p)₊, with that mass where rows are given; unknown (None) or arbitrary
        where ``ratio`` ≥ 1, as a path does not end before such a token.
    """

    ratio: Float[Tensor, "rows"]
    residual: Residual | None
