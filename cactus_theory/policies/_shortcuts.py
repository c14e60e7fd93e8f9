"""Shortcuts of a verifier before it reads whole rows: equal answers, up to rounding.

The knobs of a policy make one such object. Entries are those of drafted tokens, float64, of one
shape; rows are on the CPU, in one precision.
"""

import math
from abc import abstractmethod

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.optimum.look_ahead import LookAhead
from cactus_theory.policies._decisions import Node

Entries = Float[Tensor, "*any"]
Flags = Bool[Tensor, "*any"]


class Shortcuts:
    """Shortcuts of a policy that needs the whole row for every decision."""

    # a bound on h_n/q_n of all tokens of all rows
    highest: float = math.inf
    # the best law of blocks of deterministic drafts, if h is that law
    look_ahead: LookAhead | None = None

    def accepted(self, q_n: Entries, p_n: Entries, coin: Entries) -> Flags:
        """Return the tokens that are accepted whatever the rest of their rows is."""
        return torch.zeros_like(q_n, dtype=torch.bool)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n in a block, equal if exact; 1 may stand for any ratio above."""
        return torch.zeros_like(q_n), torch.full_like(q_n, torch.inf)


class AcceptsLossless(Shortcuts):
    """Accepts at least the tokens of lossless sampling: φ(n) ≥ min(1, q_n/p_n)."""

    def accepted(self, q_n: Entries, p_n: Entries, coin: Entries) -> Flags:
        """Return coin < q_n/p_n."""
        return coin * p_n < q_n


class ByRow(AcceptsLossless):
    """Decides one row at a time on the CPU, solving its band only as far as its coin needs."""

    def decide(self, q: np.ndarray, p: np.ndarray, ratio: float) -> tuple[bool, float]:
        """Return whether a token of coin·p_n/q_n = ``ratio`` is accepted, and the residual's scale.

        The scale of a token that is accepted is arbitrary.
        """
        raise NotImplementedError

    @abstractmethod
    def follow(self, node: Node) -> tuple[float, float | None, float | None]:
        """Return a node's P h_n/p_n, the residual's scale s, and P h/q of deterministic tokens.

        h is that of the node's selection law; (P h − p)₊ = (s q − p)₊ at tokens that are not
        deterministic. From 1 on the first may be any such number. The scale, at most P, may be None
        unless ``node.ends``, and so may the third, the same for all deterministic tokens of q > 0.
        """
