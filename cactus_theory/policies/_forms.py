"""Two shapes that many policies have.

One is given by a ceiling and a scale that depend on the drafted entries only: keep n iff
coin·p_n < c(q_n, p_n); after a refusal draw from (s·q − p)₊ with a scale s(q_n, c). A verifier
needs one pass over a row, and only after a refusal (THEORY.md, Theorem 16). The other emits the
draft's row where it seems good enough, else the target's.
"""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.policies._base import (
    Entries,
    FixedTarget,
    Flat,
    FlatCoins,
    FlatIds,
    Id,
    Ids,
    Policy,
    Rows,
    keep_probability,
    normalised_or,
)
from cactus_theory.policies._declaration import Support
from cactus_theory.policies._path import UNSCALED, Decision, Residual


class Entrywise(Policy):
    """Keep n with min(1, c(q_n, p_n)/p_n), recover from (s·q − p)₊ normalised."""

    entrywise = True

    @abstractmethod
    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return c, from float64 entries; 0 where the token may not be emitted."""

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return s of the residual after the token was refused."""
        return torch.ones_like(q_n)

    def residual_entries(self, q_n: FlatCoins, ceiling: FlatCoins) -> Residual:
        """Return the residual after refusing tokens of these entries and ceilings."""
        return Residual(scale=self.scale(q_n, ceiling))

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, c/p_n): only the drafted entries are read."""
        q_n, p_n = (row.gather(-1, n).double() for row in (q, p))
        return keep_probability(self.ceiling(q_n, p_n), p_n)

    def recovery(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return (s·q − p)₊ normalised, q where nothing can be rejected."""
        q_n, p_n = (row.gather(-1, n[..., None])[..., 0].double() for row in (q, p))
        scale = self.scale(q_n, self.ceiling(q_n, p_n))[..., None]
        q, p = q.double(), p.double()
        return normalised_or((scale * q - p).clamp(min=0.0), q)

    def decide(self, q: Flat, p: Flat, n: FlatIds, coin: FlatCoins) -> Decision:
        """Return coin < c/p_n and the scale s."""
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        ceiling = self.ceiling(q_n, p_n)
        kept = coin < keep_probability(ceiling, p_n)
        return Decision(kept, self.residual_entries(q_n, ceiling))


class Raised(Entrywise, FixedTarget):
    r"""Entrywise with c ≥ q_n and s = 1: keep more than lossless sampling, recover as it does.

    The emitted law is min(p, c) + (1 − A)(q − p)₊/TV(p, q), pointwise between p and q, and
    A = Σ min(p, c): lossless sampling on that law as a fixed target does the same.
    """

    keeps_what_lossless_keeps = True

    def residual_entries(self, q_n: FlatCoins, ceiling: FlatCoins) -> Residual:
        """Return s = 1."""
        return Residual(scale=UNSCALED)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return the emitted law."""
        kept = p.minimum(self.ceiling(q, p))
        lost = (p - kept).sum(-1, keepdim=True)
        return kept + lost * normalised_or((q - p).clamp(min=0.0), q)


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
