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
    """Nothing is known without the rows."""

    # a bound on h_n/q_n of all tokens of all rows
    highest: float = math.inf
    # the best law of blocks whose drafts are deterministic, where h is that
    look_ahead: LookAhead | None = None

    def accepted(self, q_n: Entries, p_n: Entries, coin: Entries) -> Flags:
        """Return which tokens are accepted whatever the rest of their rows holds."""
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
    """A row at a time is decided and followed on the host, solved as far as its coin asks."""

    def decide(self, q: np.ndarray, p: np.ndarray, ratio: float) -> tuple[bool, float]:
        """Return whether a token of coin·p_n/q_n = ``ratio`` is accepted; if not, its residual's s.

        The scale of a token that is accepted is arbitrary.
        """
        raise NotImplementedError

    @abstractmethod
    def follow(self, node: Node) -> tuple[float, float | None, float | None]:
        """Return a node's P h_n/p_n, the scale s of what is left, P h/q of deterministic tokens.

        h is that of the node's selection law; (P h − p)₊ = (s q − p)₊ at tokens that are not
        deterministic. From 1 on the first may be any such number. The scale, at most P, may be None
        unless ``node.ends``, and so may the third, the same for all deterministic tokens of q > 0.
        """
