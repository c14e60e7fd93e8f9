"""Base classes of policies: a shared residual, a fixed row h, a ceiling by entries, proposals."""

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
    """Policies whose residual law depends on the row, but not on the token that was rejected."""

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return pφ + (1 − A)·g, in O(V) for a row."""
        q, p = float64_rows(q, p)
        accepted = p * self.acceptance_row(q, p)
        refused = (p - accepted).clamp(min=0.0)  # g is read only for tokens that can be rejected
        lost = refused.sum(-1, keepdim=True)
        return accepted + lost * self.residual(q, p, refused.argmax(-1))


class FixedTarget(Policy):
    """Policies that emit a row h in place of q: lossless speculative sampling with target h.

    h does not depend on the drafted token. φ(n) = min(1, h_n/p_n), g ∝ (h − p)₊. The emitted law is
    h and the acceptance Σ min(p, h) = 1 − TV(p, h), the best possible for that h.
    """

    row_is_emitted = True  # ``target`` must return a row, not None

    @abstractmethod
    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the row h that is emitted instead of q, in the precision of the rows."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, h_n/p_n)."""
        q, p = float64_rows(q, p)
        return accept_probability(self.target(q, p).gather(-1, n), p.gather(-1, n))

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return (h − p)₊ normalised, q where nothing can be rejected."""
        q, p = float64_rows(q, p)
        return normalised_or((self.target(q, p) - p).clamp(min=0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return h itself."""
        q, p = float64_rows(q, p)
        return self.target(q, p)


class Entrywise(Policy):
    """Policies that accept by the drafted token's entries: φ(n) = min(1, c/p_n) with a ceiling c.

    c is a function of q_n and p_n. The residual is (s·q − p)₊ over its sum, with a scale s that is
    a function of q_n and c. A verifier needs one pass over a row, only after a rejection
    (THEORY.md, Theorem 16). A subclass with a ``target`` h must have h_n = c where c < p_n, and
    h_n ≥ p_n elsewhere, so that no rejected mass returns to a token that can be rejected.
    """

    @abstractmethod
    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the ceiling c, from float64 entries; 0 where the token may not be emitted."""

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return the scale s of the residual after the token was rejected: 1 by default."""
        return torch.ones_like(q_n)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, c/p_n), c the ceiling, from the drafted entries of the rows alone."""
        q_n, p_n = (ungraphed(row).gather(-1, n).double() for row in (q, p))
        return self.acceptance_of(q_n, p_n)

    def acceptance_of(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the acceptance min(1, c/p_n), c the ceiling, from float64 entries q_n and p_n."""
        return accept_probability(self.ceiling(q_n, p_n), p_n)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return φ = min(1, c/p_n) as both bounds, but ∞ as the upper bound where φ is 1."""
        accepted = self.acceptance_of(q_n, p_n)
        return accepted, torch.where(accepted < 1, accepted, torch.inf)

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return (s·q − p)₊ normalised, q where nothing can be rejected."""
        q, p = float64_rows(q, p)
        q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
        scale = self.scale(q_n, self.ceiling(q_n, p_n))[..., None]
        return normalised_or((scale * q - p).clamp(min=0.0), q)


class PerProposal(Entrywise):
    r"""Policies that raise the drafted token to γ, a function of q_n alone with γ ≥ q_n.

    The rest of q is scaled down: :math:`h^{(n)}_n = γ_n` and :math:`h^{(n)}_i = s_n q_i` with
    :math:`s_n = (1−γ_n)/(1−q_n)`. So the row h⁽ⁿ⁾ depends on the drafted token n. The emitted law
    is none of these rows; :meth:`emitted` computes this law (THEORY.md, Theorem 4).
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
        """Return γ for finite delta and 0 < q_n < 1, float64."""

    def gamma(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ with its limits: 0 at q_n = 0, 1 at q_n = 1, q_n at δ = 0, 1 at δ = ∞."""
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
        """Return s = (1 − γ)/(1 − q_n), and 1 where γ = q_n, so that h is q there.

        A rejected token n has p_n > γ_n ≥ s q_n: the residual is 0 at n.
        """
        scale = (1 - ceiling) / (1 - q_n).clamp_(min=torch.finfo(q_n.dtype).tiny)
        return torch.where(ceiling > q_n, scale, 1.0)

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the emitted law: unlike a proposal, it does not depend on the drafted token."""
        return self.emitted(q, p)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact emitted law in O(V log V) for a row.

        out(x) = min(p_x, γ_x) + Σ_n (R_n/Z_n)(s_n q_x − p_x)₊ with R_n = (p_n − γ_n)₊ and
        Z_n = Σ_y (s_n q_y − p_y)₊. Terms are positive only for s_n > p_x/q_x. So if the tokens that
        can be rejected are sorted by falling s, both sums are differences of prefix sums.
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
        """Return Σ_n (R_n/Z_n)(s_n q − p)₊, by prefix sums over the rejected tokens n.

        The terms are sorted by falling s_n. Token x has a part in the first ``above`` terms, those
        with s_n > p_x/q_x. R_n is ``lost``, the rejected mass of n.
        """
        lost = (p - gamma).clamp_(min=0.0)
        scale = torch.where(lost > 0, self.scale(q, gamma), -torch.inf)
        scale, order = scale.sort(-1, descending=True)
        lost = lost.gather(-1, order)
        ratio = (p / q).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        above = torch.searchsorted(-scale, ratio.neg_())  # the count of s_n > p_x/q_x

        def beyond(mass: Tensor) -> Tensor:
            """Return for each term the sum of ``mass`` over the tokens that have a part in it."""
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
