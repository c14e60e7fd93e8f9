"""Policies that emit the draft's row where it seems good enough, else the target's."""

from abc import abstractmethod

import torch
from jaxtyping import Bool
from torch import Tensor

from cactus_theory.policies._base import FixedTarget, Flat, FlatCoins, FlatIds, Rows, normalised_or
from cactus_theory.policies._declaration import Support
from cactus_theory.policies._residual import UNSCALED, Decision, Residual


class Either(FixedTarget):
    """Lossless sampling on h = p where :meth:`takes_draft` is true, else on h = q.

    Tokens with q = 0 are refused under support ``target``: then h is p on the target's support,
    and what p has beyond it goes to (q − p)₊. Under ``free``, as published, h is p itself.
    """

    keeps_what_lossless_keeps = True
    support: Support

    @abstractmethod
    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return whether h = p."""

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return p on its support, or q."""
        drafted = p
        if self.support == "target":
            drafted = torch.where(q > 0, p, 0.0)
            lost = (p - drafted).sum(-1, keepdim=True)
            drafted = drafted + lost * normalised_or((q - p).clamp(min=0.0), q)
        return torch.where(self.takes_draft(q, p)[..., None], drafted, q)

    def decide(self, q: Flat, p: Flat, n: FlatIds, coin: FlatCoins) -> Decision:
        """Return kept where h is p, else what lossless sampling decides, with s = 1."""
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        taken = self.takes_draft(q, p)
        if self.support == "target":
            taken &= q_n > 0
        kept = (coin * p_n < q_n) | taken
        return Decision(kept, Residual(scale=UNSCALED))
