"""Policies that verify a row against p itself or against q, one or the other."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.policies._base import FixedTarget, Rows
from cactus_theory.policies._residual import UNSCALED, Decision, Residual


class Either(FixedTarget):
    """Lossless sampling on h = p where :meth:`takes_draft` is true, else on h = q."""

    keeps_what_lossless_keeps = True

    @abstractmethod
    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return whether h = p."""

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return p or q."""
        return torch.where(self.takes_draft(q, p)[..., None], p, q)

    def decide(
        self,
        q: Float[Tensor, "rows vocab"],
        p: Float[Tensor, "rows vocab"],
        n: Int[Tensor, "rows"],
        coin: Float[Tensor, "rows"],
    ) -> Decision:
        """Return kept where h = p, else what lossless sampling decides, with s = 1."""
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        kept = (coin * p_n < q_n) | self.takes_draft(q, p)
        return Decision(kept, Residual(scale=UNSCALED))
