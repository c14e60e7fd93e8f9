"""Speculative cascades: emit from the draft where it seems reliable."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies._base_classes import Either, FixedTarget
from cactus_theory.policies._decisions import SUPPORTS, Declaration, Path, Support
from cactus_theory.policies._policy import TIE, Rows
from cactus_theory.policies._registry import register


@register("cascade_opt")
@dataclass(frozen=True)
class CascadeOpt(Either):
    r"""Lossless sampling on h = p where :math:`\max p ≥ \max q − α\,TV(p, q)`, else on h = q.

    Bounds no divergence. Tokens that the target excludes are refused; with ``support="free"``,
    as published, they are emitted where h = p. α = −∞ is lossless.
    Source: Narasimhan et al. 2025 (Faster Cascades via Speculative Decoding,
    arXiv 2405.19261), the deferral called OPT.
    """

    alpha: float
    support: Support = "target"
    knob = "alpha"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", check.number("alpha", self.alpha, -math.inf))
        check.one_of("support", self.support, SUPPORTS)

    @property
    def declares(self) -> Declaration:
        """Return: no budget; between p and q, as it is one of them."""
        return Declaration(
            1,
            -math.inf,
            None,
            True,
            at_least_speculative=True,
            continuous=False,
            support=self.support,
        )

    def takes_draft(self, q: Rows, p: Rows) -> Bool[Tensor, "*batch"]:
        """Return whether h = p."""
        q, p = q.double(), p.double()
        apart = (p - q).abs().sum(-1) / 2
        slack = torch.where(apart > 0, self.alpha * apart, 0.0)  # 0 for ∞·0, of equal rows
        return p.amax(-1) >= q.amax(-1) - slack - TIE


@register("cascade_token")
@dataclass(frozen=True)
class CascadeToken(FixedTarget):
    r"""Lossless sampling on :math:`h_v = p_v 1[v ∈ T] + (1 − p(T))\,q_v`.

    :math:`T = \{v: q_v ≥ (1−α) \max q, q_v > 0\}`: the draft's probability is used for tokens
    that the target also ranks high. h is not always between p and q, and may accept less than
    lossless sampling; acceptance need not grow with α. α = −∞ is lossless, α = 1 is h = p on the
    target's support.
    Source: Narasimhan et al. 2025 (arXiv 2405.19261), the token-specific rule.
    """

    alpha: float
    knob = "alpha"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", check.number("alpha", self.alpha, -math.inf, 1))

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance need not grow with α."""
        return Declaration(0, -math.inf, None, continuous=False)

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return p on the trusted tokens, and q times the rest of the mass."""
        high = (q >= (1 - self.alpha) * q.amax(-1, keepdim=True)) & (q > 0)
        trusted = torch.where(high, p, 0.0)
        left = (1 - trusted.sum(-1, keepdim=True)).clamp(min=0.0)
        return trusted + left * q
