"""Rows on a drafted path, for verifiers of whole blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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
    left : (...) int64, how many drafted tokens are planned to follow the one that is drafted at
        the row. A draft that stops early by what it drafted does not change it, or h would
        depend on the drafted token.
    raised : (...) float64, h_n of the drafted token where the drafter was certain and the
        policy has looked ahead (:meth:`Policy.certain_path`); None elsewhere. Of several certain
        tokens (:meth:`Policy.certain_tree`) their sum, and the draft's row has their shares.
    """

    alive: Float[Tensor, "*batch"]
    left: Int[Tensor, "*batch"]
    raised: Float[Tensor, "*batch"] | None = None

    def at(self, row: int) -> "Path":
        """Return the path to one of R rows; NaN is the ``raised`` of one without."""
        alive, left = self.alive[row : row + 1], self.left[row : row + 1]
        if self.raised is None or bool(self.raised[row].isnan()):
            return Path(alive, left)
        return Path(alive, left, self.raised[row : row + 1])


class Node(NamedTuple):
    """One node of a path, on the CPU, and the token drafted there.

    Attributes
    ----------
    q, p : rows (V,), numpy, of one precision. Where tokens are certain p is the row that was
        sampled from beside them, 0 where none was.
    q_n, p_n : their entries at the drafted token.
    alive, left : as in :class:`Path`.
    ends : whether the path may end at the node, so that the residual is needed.
    certain : ids of the tokens that are certain there, and whether the drafted one is, too.
    """

    q: np.ndarray
    p: np.ndarray
    q_n: float
    p_n: float
    alive: float
    left: int
    ends: bool
    certain: Sequence[int] = ()
    joint: bool = False

    @property
    def asked(self) -> float:
        """Return p_n/q_n, ∞ where q_n = 0."""
        return self.p_n / self.q_n if self.q_n > 0 else math.inf

    @property
    def kept(self) -> float:
        """Return P q_n/p_n, ∞ where p_n = 0 < q_n."""
        if self.p_n > 0:
            return self.alive * self.q_n / self.p_n
        return math.inf if self.q_n > 0 else 0.0


@dataclass(frozen=True)
class Step:
    """What a policy's row h makes of N nodes and the tokens drafted there.

    Attributes
    ----------
    ratio : (N,) float64, P h_n/p_n; the alive ratio after the token is min(1, ratio).
    residual : of (P h − p)₊, with that mass where rows are given; arbitrary
        where ``ratio`` ≥ 1, as a path does not end before such a token.
    """

    ratio: Float[Tensor, "rows"]
    residual: Residual
