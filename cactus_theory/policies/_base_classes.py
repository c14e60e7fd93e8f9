"""Shapes that many policies have: a row h, a ceiling of drafted entries, a row of every token."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.base.tolerances import LEAST
from cactus_theory.optimum.rows import DraftRow, NodeRow, loops
from cactus_theory.policies._decisions import Path, Support
from cactus_theory.policies._policy import (
    Entries,
    Id,
    Ids,
    Policy,
    Rows,
    accept_probability,
    normalised_or,
)


class SharedResidual(Policy):
    """Policies with one residual law per row, whichever token was refused."""

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return pφ + (1 − A)·g, O(V) a row."""
        q, p = float64_rows(q, p)
        accepted = p * self.acceptance_row(q, p)
        refused = (p - accepted).clamp(min=0.0)  # g is read only for tokens that can be refused
        lost = refused.sum(-1, keepdim=True)
        return accepted + lost * self.residual(q, p, refused.argmax(-1))


class FixedTarget(Policy):
    """Lossless speculative sampling on a row h that does not depend on the drafted token.

    φ(n) = min(1, h_n/p_n), g ∝ (h − p)₊. The emitted law is h and the acceptance
    Σ min(p, h) = 1 − TV(p, h), the best possible for that h.
    """

    row_is_emitted = True  # None is no answer of ``target``

    @abstractmethod
    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
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
    """Accept n with min(1, c(q_n, p_n)/p_n); the residual is (s·q − p)₊ over its sum, s of q_n, c.

    A verifier needs one pass over a row, only after a refusal (THEORY.md, Theorem 16).
    """

    @abstractmethod
    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return c, from float64 entries; 0 where the token may not be emitted."""

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return s of the residual after the token was refused."""
        return torch.ones_like(q_n)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, c/p_n): only the drafted entries are read."""
        q_n, p_n = (ungraphed(row).gather(-1, n).double() for row in (q, p))
        return self.acceptance_of(q_n, p_n)

    def acceptance_of(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return min(1, c/p_n) from float64 entries."""
        return accept_probability(self.ceiling(q_n, p_n), p_n)

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return (s·q − p)₊ normalised, q where nothing can be rejected."""
        q, p = float64_rows(q, p)
        q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
        scale = self.scale(q_n, self.ceiling(q_n, p_n))[..., None]
        return normalised_or((scale * q - p).clamp(min=0.0), q)


class Raised(Entrywise, FixedTarget):
    r"""Entrywise with c ≥ q_n and s = 1: accept more than lossless sampling, with its residual.

    The emitted law is min(p, c) + (1 − A)(q − p)₊/TV(p, q), pointwise between p and q, and
    A = Σ min(p, c): lossless sampling on that law as a fixed target does the same.
    """

    between = True

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return c/p_n, exact below 1: of what is refused nothing comes back to a refused token."""
        return _exact_below_1(self.acceptance_of(q_n, p_n))

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return the emitted law."""
        q, p = map(ungraphed, (q, p)) if q.dtype == p.dtype else float64_rows(q, p)
        accepted = torch.minimum(p, self.ceiling(q, p))
        lost = (p - accepted).sum(-1, keepdim=True)
        left = (q - p).clamp_(min=0.0)
        total = left.sum(-1, keepdim=True)
        if left.is_cuda or not bool((total > 0).all()):
            return normalised_or(left, q).mul_(lost).add_(accepted)
        return left.mul_(lost / total).add_(accepted)


class Either(FixedTarget):
    """Lossless sampling on h = p where :meth:`takes_draft` is true, else on h = q.

    Tokens with q = 0 are refused under support ``target``: then h is p on the target's support,
    and what p has beyond it goes to (q − p)₊. Under ``free``, as published, h is p itself.
    """

    support: Support

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return min(1, q_n/p_n): h is p or q."""
        return accept_probability(q_n, p_n), torch.full_like(q_n, torch.inf)

    def row(
        self, q: np.ndarray, p: np.ndarray, alive: float = 1.0, certain: Sequence[int] = ()
    ) -> NodeRow | None:
        """Return q or p, where no token that the target excludes changes it."""
        if certain or loops() is None:
            return None
        if not bool(self.takes_draft(*(torch.from_numpy(row) for row in (q, p)))):
            return NodeRow(alive)
        return None if ((q <= LEAST) & (p > 0)).any() else DraftRow(q, p, alive)

    @abstractmethod
    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return whether h = p."""

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return p on its support, or q."""
        taken = self.takes_draft(q, p)
        if not (taken.is_cuda or bool(taken.any())):
            return q
        drafted = p
        if self.support == "target":
            drafted = torch.where(q > 0, p, 0.0)
            lost = (p - drafted).sum(-1, keepdim=True)
            if lost.is_cuda or bool(lost.any()):
                drafted = drafted + lost * normalised_or((q - p).clamp(min=0.0), q)
        return torch.where(taken[..., None], drafted, q)


Refused = Float[Tensor, "rows refused"]


class PerProposal(Entrywise):
    r"""A policy given by γ as a function of q_n alone, with γ ≥ q_n.

    The drafted token is raised to γ and the rest of q scaled down: :math:`h^{(n)}_n = γ_n` and
    :math:`h^{(n)}_i = s_n q_i` with :math:`s_n = (1−γ_n)/(1−q_n)`. Every token has its own row
    h⁽ⁿ⁾; the emitted law is none of them, and ``emitted`` returns it (THEORY.md, Theorem 4).
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
        if not q_n.is_cuda and bool(inner.all()):  # no limits to handle: a few passes fewer
            return torch.maximum(self.raised(q_n), q_n).clamp_(max=1.0)
        raised = self.raised(torch.where(inner, q_n, 0.5))
        return torch.where(inner, torch.maximum(raised, q_n).clamp(max=1.0), q_n)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return γ_n/p_n, exact below 1, as of :class:`Raised`."""
        return _exact_below_1(self.acceptance_of(q_n, p_n))

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return γ_n."""
        return self.gamma(q_n)

    def scale(self, q_n: Entries, ceiling: Entries) -> Entries:
        """Return s = (1 − γ)/(1 − q_n), and 1 where γ = q_n, so that h is q there.

        A refused token n has p_n > γ_n ≥ s q_n: the residual is 0 at n.
        """
        scale = (1 - ceiling) / (1 - q_n).clamp_(min=torch.finfo(q_n.dtype).tiny)
        return torch.where(ceiling > q_n, scale, 1.0)

    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"]:
        """Return h⁽ⁿ⁾ of every drafted token, (..., m, V)."""
        (q,) = float64_rows(q)
        q_n = q.gather(-1, n)
        gamma = self.gamma(q_n)
        rows = q[..., None, :] * self.scale(q_n, gamma)[..., None]
        return rows.scatter(-1, n[..., None], gamma[..., None])

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return the emitted law: a proposal depends on the drafted token, its law does not."""
        return self.emitted(q, p)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact emitted law in O(V log V) a row.

        out(x) = min(p_x, γ_x) + Σ_n (R_n/Z_n)(s_n q_x − p_x)₊ with R_n = (p_n − γ_n)₊ and
        Z_n = Σ_y (s_n q_y − p_y)₊: prefix sums of the refusable tokens, sorted by s.
        """
        shape, vocab = q.shape, q.shape[-1]
        q, p = (row.reshape(-1, vocab) for row in float64_rows(q, p))
        gamma = self.gamma(q)
        law = torch.minimum(p, gamma)
        if q.device.type == "cpu" and loops() is not None:
            for row in zip(q, p, gamma, law, strict=True):
                self._refill(*row)
        else:
            law += self._refilled_sorted(q, p, gamma)
        return law.reshape(shape)

    def _refill(self, q: Tensor, p: Tensor, gamma: Tensor, law: Tensor) -> None:
        """Add to ``law`` the residuals of one row's refused tokens."""
        refusable = torch.from_numpy(np.flatnonzero(p.numpy() > gamma.numpy()))
        if not len(refusable):
            return
        q_n, p_n, gamma_n = (row[refusable] for row in (q, p, gamma))
        scale, order = self.scale(q_n, gamma_n).sort(descending=True)
        refused = (p_n - gamma_n)[order]
        loops().add_refilled(*(part.numpy() for part in (q, p, scale, refused, law)))

    def _refilled_sorted(self, q: Rows, p: Rows, gamma: Rows) -> Rows:
        """Return Σ_n (R_n/Z_n)(s_n q − p)₊, from sums indexed by the count of s_n > p_x/q_x."""
        places, filled = _chosen(p > gamma)
        q_n, p_n, gamma_n = (part.gather(-1, places) for part in (q, p, gamma))
        scale = torch.where(filled, self.scale(q_n, gamma_n), -torch.inf)
        scale, order = scale.sort(-1, descending=True)
        lost = torch.where(filled, p_n - gamma_n, 0.0).gather(-1, order)
        ratio = (p / q).nan_to_num_(nan=torch.inf, posinf=torch.inf)
        above = torch.searchsorted(-scale, ratio.neg_())  # the count of s_n > p_x/q_x
        shortfall = _shortfall(q, p, above, scale)
        weight = torch.where(lost > 0, lost / torch.maximum(shortfall, lost), 0.0)
        return _refill(q, p, above, scale, weight)


def _exact_below_1(accepted: Entries) -> tuple[Entries, Entries]:
    """Return bounds on ratios that are known below 1, as acceptances are."""
    return accepted, torch.where(accepted < 1, accepted, torch.inf)


def _chosen(chosen: Bool[Tensor, "rows vocab"]) -> tuple[Int[Tensor, "rows most"], Tensor]:
    """Return the chosen tokens of each row (R, most), padded, and which entries are tokens."""
    rows, tokens = chosen.nonzero(as_tuple=True)
    count = torch.bincount(rows, minlength=len(chosen))
    slot = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
    most = max(int(count.max()), 1)
    places = rows.new_zeros(len(chosen), most).index_put_((rows, slot), tokens)
    return places, torch.arange(most, device=rows.device) < count[:, None]


def _shortfall(q: Rows, p: Rows, above: Int[Tensor, "rows vocab"], scale: Refused) -> Refused:
    """Return Z(s) = Σ_y (s q_y − p_y)₊ at each falling s; token y counts for ``above`` of them."""

    def beyond(mass: Tensor) -> Tensor:
        totals = mass.new_zeros(len(mass), scale.shape[-1] + 1).scatter_add_(-1, above, mass)
        return totals[:, 1:].flip(-1).cumsum(-1).flip(-1)

    value = scale * beyond(q) - beyond(p)
    return torch.where(torch.isfinite(scale), value, 0.0)


def _refill(
    q: Rows, p: Rows, above: Int[Tensor, "rows vocab"], scale: Refused, weight: Refused
) -> Rows:
    """Return Σ_n weight_n (s_n q_x − p_x)₊ for every x, with s falling."""
    zero = torch.zeros_like(weight[:, :1])
    mass = torch.cat([zero, weight.cumsum(-1)], -1)
    scaled = torch.cat([zero, torch.where(weight > 0, weight * scale, 0.0).cumsum(-1)], -1)
    return (scaled.gather(-1, above).mul_(q)).sub_(mass.gather(-1, above).mul_(p)).clamp_(min=0.0)
