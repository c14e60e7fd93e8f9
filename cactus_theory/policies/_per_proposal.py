r"""Rules that raise the drafted token to γ and scale the rest of q down.

:math:`h^{(n)}_n = γ_n` and :math:`h^{(n)}_i = s_n q_i` with :math:`s_n = (1−γ_n)/(1−q_n)`.
Keep n with min(1, γ_n/p_n), recover from (h⁽ⁿ⁾ − p)₊ normalised. Every token has its own
row h⁽ⁿ⁾, so what is emitted is none of them: ``emitted`` gives it exactly.
Source: Hao & Mou 2026 (arXiv 2604.04987).
"""

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies._base import (
    Id,
    Ids,
    Policy,
    Rows,
    draft_row,
    keep_probability,
    normalised_or,
)


class PerProposal(Policy):
    """A rule given by γ as a function of q_n alone, with γ ≥ q_n."""

    delta: float

    @abstractmethod
    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ for finite delta and 0 < q_n < 1, float64."""

    def gamma(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ with its limits: 0 at q_n = 0, 1 at q_n = 1, q_n at δ = 0, 1 at δ = ∞."""
        q_n = q_n.double().clamp(max=1.0)
        inner = (q_n > 0) & (q_n < 1)
        if self.delta == 0:
            return q_n
        if self.delta == float("inf"):
            return (q_n > 0).double()
        raised = self.raised(torch.where(inner, q_n, 0.5))
        return torch.where(inner, torch.maximum(raised, q_n).clamp(max=1.0), q_n)

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, γ_n/p_n): only the drafted entries of the rows are read."""
        gamma = self.gamma(q.gather(-1, n))
        return gamma if p is None else keep_probability(gamma, p.gather(-1, n).double())

    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"]:
        """Return h⁽ⁿ⁾ of every drafted token."""
        q_n = q.gather(-1, n).double()
        gamma = self.gamma(q_n)
        rows = q.double()[..., None, :] * self._scale(q_n, gamma)[..., None]
        return rows.scatter(-1, n[..., None], gamma[..., None])

    def recovery(self, q: Rows, p: Rows | None, n: Id) -> Rows:
        """Return (h⁽ⁿ⁾ − p)₊ normalised, q where nothing can be rejected."""
        proposal = self.proposal(q, draft_row(q, p, n), n[..., None])[..., 0, :]
        return normalised_or((proposal - draft_row(q, p, n)).clamp(min=0.0), q.double())

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the exact emitted law in O(V log V) a row.

        out(x) = min(p_x, γ_x) + Σ_n (R_n/Z_n)(s_n q_x − p_x)₊ with R_n = (p_n − γ_n)₊ and
        Z_n = Σ_y (s_n q_y − p_y)₊. Sorting by p/q turns Z into a lookup, sorting by s the sum.
        """
        gamma = self.gamma(q)
        scale = self._scale(q, gamma)
        rejected = (p - gamma).clamp(min=0.0)
        ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), torch.inf)
        weight = rejected / _shortfall(q, ratio, scale)
        weight = torch.where(rejected > 0, weight, 0.0)
        return torch.minimum(p, gamma) + _refill(q, p, ratio, scale, weight)

    def _scale(self, q_n: Tensor, gamma: Tensor) -> Tensor:
        """Return s = (1 − γ)/(1 − q_n), 0 where q_n = 1."""
        rest = 1 - q_n
        return torch.where(rest > 0, (1 - gamma) / torch.where(rest > 0, rest, 1.0), 0.0)


def _shortfall(q: Tensor, ratio: Tensor, scale: Tensor) -> Tensor:
    """Return Z(s) = Σ_y (s q_y − p_y)₊ at each s of ``scale``, by one sort of p/q.

    Accumulated from non-negative pieces, so small values keep their relative accuracy.
    """
    order = ratio.argsort(-1)
    knots = ratio.gather(-1, order)
    below = q.gather(-1, order).cumsum(-1)
    # tokens with q = 0 sit at the end with an infinite ratio and are never below any s ≤ 1
    steps = torch.where(torch.isfinite(knots[..., 1:]), knots[..., 1:] - knots[..., :-1], 0.0)
    at_knot = torch.cat(
        [torch.zeros_like(below[..., :1]), (steps * below[..., :-1]).cumsum(-1)], -1
    )
    index = torch.searchsorted(knots.contiguous(), scale.contiguous()) - 1
    last = index.clamp(min=0)
    value = at_knot.gather(-1, last) + (scale - knots.gather(-1, last)) * below.gather(-1, last)
    return torch.where(index >= 0, value, 0.0)


def _refill(q: Tensor, p: Tensor, ratio: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return Σ_n weight_n (s_n q_x − p_x)₊ for every x, by one sort of s."""
    order = scale.argsort(-1, descending=True)
    scale, weight = scale.gather(-1, order), weight.gather(-1, order)
    zero = torch.zeros_like(scale[..., :1])
    mass = torch.cat([zero, weight.cumsum(-1)], -1)
    scaled = torch.cat([zero, (weight * scale).cumsum(-1)], -1)
    above = torch.searchsorted(-scale.contiguous(), -ratio.contiguous())  # s_n > p_x/q_x
    return (scaled.gather(-1, above) * q - mass.gather(-1, above) * p).clamp(min=0.0)
