"""Base classes of policies, by what the acceptance and the residual distribution depend on."""

from abc import abstractmethod

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.tensors import float64_rows, ungraphed
from cactus_theory.optimum.band_row import loops
from cactus_theory.policies.policy import (
    Entries,
    Id,
    Ids,
    PathState,
    Policy,
    Rows,
    accept_probability,
    normalised_or,
)


class SharedResidual(Policy):
    """Policies whose residual distribution does not depend on which token was rejected."""

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the emitted law pφ + (1 − A)·g in O(V) per row.

        A is the acceptance, and g the residual distribution.
        """
        q, p = float64_rows(q, p)
        accepted = p * self.acceptance_row(q, p)
        refused = (p - accepted).clamp(min=0.0)  # g is read only for tokens that can be rejected
        lost = refused.sum(-1, keepdim=True)
        return accepted + lost * self.residual(q, p, refused.argmax(-1))


class FixedTarget(Policy):
    """Policies that emit a row h in place of q, by lossless speculative sampling with target h.

    h does not depend on the drafted token n, which is accepted with probability min(1, h_n/p_n).
    The recovered token is drawn from (h − p)₊ normalised. So the emitted law is h, and the
    acceptance is Σ min(p, h) = 1 − TV(p, h), the largest of any policy with this emitted law.
    """

    row_is_emitted = True  # ``target`` must return a row, not None

    @abstractmethod
    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the row h that is emitted instead of q, in the precision of the rows."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return the acceptance φ(n) = min(1, h_n/p_n) of drafted tokens n."""
        q, p = float64_rows(q, p)
        return accept_probability(self.target(q, p).gather(-1, n), p.gather(-1, n))

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the residual distribution (h − p)₊ divided by its sum, or q if the sum is 0."""
        q, p = float64_rows(q, p)
        return normalised_or((self.target(q, p) - p).clamp(min=0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the emitted law, which is h."""
        q, p = float64_rows(q, p)
        return self.target(q, p)


class Entrywise(Policy):
    """Policies whose acceptance φ(n) = min(1, c/p_n) depends on q_n and p_n alone.

    The ceiling c, a function of q_n and p_n, bounds the probability p_n φ(n) that n is drafted and
    accepted. The residual distribution is (s·q − p)₊ divided by its sum, where the scale s is a
    function of q_n and c. A verifier reads whole rows only after a rejection, in one pass
    (THEORY.md, Theorem 16). If a subclass has a ``target`` h, h_n must be c where c < p_n, and at
    least p_n elsewhere. The residual is then 0 at all tokens that can be rejected.
    """

    @abstractmethod
    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the ceiling c from float64 entries q_n, p_n; 0 where n may not be emitted."""

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return the scale s of the residual (s·q − p)₊ after n was rejected: 1 by default."""
        return torch.ones_like(q_n)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n) = min(1, c/p_n), with the ceiling c, from q_n and p_n of drafted tokens n."""
        q_n, p_n = (ungraphed(row).gather(-1, n).double() for row in (q, p))
        return self.acceptance_of(q_n, p_n)

    def acceptance_of(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return φ(n) = min(1, c/p_n), with the ceiling c, from float64 entries q_n and p_n."""
        return accept_probability(self.ceiling(q_n, p_n), p_n)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return φ = min(1, c/p_n) as lower and as upper bound; the upper is ∞ where φ is 1."""
        accepted = self.acceptance_of(q_n, p_n)
        return accepted, torch.where(accepted < 1, accepted, torch.inf)

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the residual distribution (s·q − p)₊ divided by its sum, or q if the sum is 0."""
        q, p = float64_rows(q, p)
        q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
        scale = self.scale(q_n, self.ceiling(q_n, p_n))[..., None]
        return normalised_or((scale * q - p).clamp(min=0.0), q)


class PerProposal(Entrywise):
    r"""Policies that verify a drafted token n against q with γ_n ≥ q_n, a function of q_n, as q_n.

    All other entries are scaled down: the proposal row has :math:`h^{(n)}_n = γ_n ≥ q_n` and
    :math:`h^{(n)}_i = s_n q_i` with :math:`s_n = (1−γ_n)/(1−q_n)`. Since h⁽ⁿ⁾ depends on the
    drafted token n, the emitted law is none of these rows; :meth:`emitted` computes the emitted
    law (THEORY.md, Theorem 4).
    Source: Hao & Mou 2026 (arXiv 2604.04987).

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Doubled(ct.PerProposal):
    ...     delta: float = 1.0
    ...     def raised(self, q_n):
    ...         return q_n * (1 + self.delta)
    >>> n = torch.tensor([0])
    >>> Doubled().acceptance(torch.tensor([0.2, 0.8]), torch.tensor([0.8, 0.2]), n)
    tensor([0.5000], dtype=torch.float64)
    """

    between = True
    delta: float

    @abstractmethod
    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return the raised probability γ for finite delta and 0 < q_n < 1, float64."""

    def gamma(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ: :meth:`raised`, or 0 at q_n = 0, 1 at q_n = 1, q_n at δ = 0 and 1 at δ = ∞."""
        q_n = q_n.double().clamp(max=1.0)
        if self.delta == 0:
            return q_n
        if self.delta == float("inf"):
            return (q_n > 0).double()
        inner = (q_n > 0) & (q_n < 1)
        if not q_n.is_cuda and bool(inner.all()):  # no limits to handle, so fewer passes
            return torch.maximum(self.raised(q_n), q_n).clamp_(max=1.0)
        # ½ stands for entries that are not passed on
        raised = self.raised(torch.where(inner, q_n, 0.5))
        return torch.where(inner, torch.maximum(raised, q_n).clamp(max=1.0), q_n)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        return self.gamma(q_n)

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return the residual's scale s = (1 − γ)/(1 − q_n); 1 where γ = q_n, as then h⁽ⁿ⁾ = q.

        A rejected token n has p_n > γ_n ≥ s q_n, so that the residual (s q − p)₊ is 0 at n.
        """
        scale = (1 - ceiling) / (1 - q_n).clamp_(min=torch.finfo(q_n.dtype).tiny)
        return torch.where(ceiling > q_n, scale, 1.0)

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the emitted law, which unlike h⁽ⁿ⁾ does not depend on the drafted token n."""
        return self.emitted(q, p)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact emitted law in O(V log V) per row.

        out(x) = min(p_x, γ_x) + Σ_n (R_n/Z_n)(s_n q_x − p_x)₊, with the rejected mass
        R_n = (p_n − γ_n)₊ and the residual's mass Z_n = Σ_y (s_n q_y − p_y)₊. The term of n is
        positive only for s_n > p_x/q_x. So if the tokens n are sorted by falling s_n, the sums over
        n and over y follow from prefix sums, without a loop over pairs of tokens.
        """
        shape, vocab = q.shape, q.shape[-1]
        q, p = (row.reshape(-1, vocab) for row in float64_rows(q, p))
        gamma = self.gamma(q)
        law = torch.minimum(p, gamma).contiguous()
        # the compiled loop has the formula of ``scale`` above, not that of a subclass
        if q.device.type != "cpu" or loops() is None or type(self).scale is not PerProposal.scale:
            law += self._refilled_sorted(q, p, gamma)
        else:
            rows = (np.ascontiguousarray(part.numpy()) for part in (q, p, gamma))
            loops().add_refilled(*rows, law.numpy())
        return law.reshape(shape)

    def _refilled_sorted(self, q: Rows, p: Rows, gamma: Rows) -> Rows:
        """Return Σ_n (R_n/Z_n)(s_n q − p)₊, the sum in :meth:`emitted`, by prefix sums over n.

        The terms are sorted by falling s_n. Then the terms that are positive at a token x, those
        with s_n > p_x/q_x, come first.
        """
        lost = (p - gamma).clamp_(min=0.0)
        scale = torch.where(lost > 0, self.scale(q, gamma), -torch.inf)
        scale, order = scale.sort(-1, descending=True)
        lost = lost.gather(-1, order)
        ratio = (p / q).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        above = torch.searchsorted(-scale, ratio.neg_())  # the count of s_n > p_x/q_x

        def beyond(mass: Tensor) -> Tensor:
            """Return for each term n the sum of ``mass`` over the tokens where the term is > 0."""
            totals = mass.new_zeros(len(mass), mass.shape[-1] + 1).scatter_add_(-1, above, mass)
            return totals[:, 1:].flip(-1).cumsum(-1).flip(-1)

        zero = torch.zeros_like(q[:, :1])
        scale = torch.where(lost > 0, scale, 0.0)
        shortfall = scale * beyond(q) - beyond(p)  # Z(s_n) = Σ_y (s_n q_y − p_y)₊
        # Z_n ≥ R_n, since the row raised at n and p both sum to 1; rounding may bring Z_n below
        weight = torch.where(lost > 0, lost / torch.maximum(shortfall, lost), 0.0)
        weights = torch.cat([zero, weight.cumsum(-1)], -1).gather(-1, above)
        scaled = torch.cat([zero, (weight * scale).cumsum(-1)], -1).gather(-1, above)
        return scaled.mul_(q).sub_(weights.mul_(p)).clamp_(min=0.0)
