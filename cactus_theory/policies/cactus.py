"""Cactus as published, and the exact solution of the problem that Cactus approximates."""

import math
import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.roots import convex_root
from cactus_theory.base.tensors import float64_rows, from_numpy
from cactus_theory.divergences.definition import known_divergence
from cactus_theory.optimum.band_row import loops
from cactus_theory.policies._base_classes import PerProposal
from cactus_theory.policies.claims import Budget, Declaration
from cactus_theory.policies.knob_values import DivergenceSpec, NotNegative
from cactus_theory.policies.registry import register

# largest 2δ used: with δ = ∞ the formula's ∞·0 would be NaN
MOST = sys.float_info.max
# number of entries from which one compiled pass takes less time than a few passes of torch
MANY = 1 << 10


@register("cactus")
@dataclass(frozen=True)
class Cactus(PerProposal):
    r"""Raise the drafted token by the published second-order formula.

    .. math:: \gamma_n = \min\{1,\; q_n + \sqrt{2\delta\, q_n (1 - q_n)}\}

    The formula is exact for Pearson chi-square with budget :math:`2\delta`. The KL of a proposal
    row from q can reach :math:`\ln(1 + 2\delta)`, although delta is meant as a bound on this KL in
    nats; audits check delta as this bound. Source: Hao & Mou 2026, Corollary 5; THEORY.md, Theorems
    2 and 6.

    Parameters
    ----------
    delta : the budget δ of a proposal, ≥ 0.
    """

    delta: NotNegative
    knob = "delta"

    @property
    def declares(self) -> Declaration:
        """Return: KL of every proposal at most delta (the published claim, not always true)."""
        budget = Budget("kl", self.delta, "per proposal")
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True)

    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ, the raised q_n, for 0 < q_n < 1 and finite delta; ``gamma`` adds the limits."""
        twice = min(2 * self.delta, MOST)
        return ((1 - q_n) * q_n).mul_(twice).sqrt_().add_(q_n).clamp_(max=1.0)

    def gamma(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ, also at q_n = 0 (γ is 0) and 1 (γ is 1), and for delta = 0 (q_n) and ∞ (1)."""
        if not 0 < self.delta < math.inf:
            return super().gamma(q_n)
        (q_n,) = float64_rows(q_n)
        if q_n.is_cuda or q_n.numel() < MANY or (compiled := loops()) is None:
            return self.raised(q_n.clamp(max=1.0))
        compiled.write_raised(
            q_n.flatten().numpy(), min(2 * self.delta, MOST), out := np.empty(q_n.numel())
        )
        return from_numpy(out).view(q_n.shape)


@register("cactus_exact")
@dataclass(frozen=True)
class CactusExact(PerProposal):
    r"""Raise q_n of the drafted token n to the largest h_n of any row h with D(h‖q) ≤ δ.

    .. math:: \max_h h_n \quad\text{s.t.}\quad h \in \Delta,\; D(h\|q) \le \delta

    For an f-divergence this h_n, called γ, is the largest root in [q_n, 1] of
    :math:`q_n f(γ/q_n) + (1−q_n) f((1−γ)/(1−q_n)) = δ`, and 1 if there is no root. The solution is
    exact in float64 unless f(γ/q_n) overflows. At orders above 1 (alpha, Rényi, Pearson) it
    overflows for tokens of tiny q_n, which then are not raised. At δ = 0.3 these are the tokens
    with q_n below 1e-82 (order 2), 1e-33 (4) and 1e-20 (10), for which γ would be 1e-18 at most.
    The budget holds for each proposal row, not for the emitted law. Source of the program: Hao &
    Mou 2026, section 3; of the solution: THEORY.md, Theorem 3.

    Parameters
    ----------
    delta : the budget δ of a proposal, ≥ 0, in the divergence's unit.
    divergence : spec of the divergence D.
    """

    delta: NotNegative
    divergence: DivergenceSpec = "kl"
    knob = "delta"

    @property
    def declares(self) -> Declaration:
        """Return: divergence of every proposal at most delta."""
        budget = Budget(self.divergence, self.delta, "per proposal")
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True, optimal=True)

    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return γ, the raised q_n, for 0 < q_n < 1 and finite delta; ``gamma`` adds the limits."""
        kind = known_divergence(self.divergence)
        if kind.generator is None:
            return q_n * kind.ceiling(torch.full_like(q_n, self.delta))
        q, places = q_n, cast(Any, ...)  # with ``...`` as places γ is returned as it is
        if q_n.numel() >= MANY:
            # tokens in one cell of a cut trace (traces/cells.py) have equal q; one search takes as
            # long as many sorts
            q, places = cast(Any, q_n).unique(return_inverse=True)
        f, delta = kind.generator, kind.to_generator(torch.full_like(q, self.delta))
        one = torch.ones_like(q)
        gamma = convex_root(lambda x: f.two_points(x, q), over=one, under=q, budget=delta)
        return gamma[places]
