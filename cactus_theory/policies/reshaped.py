"""The baselines any lossy policy has to beat: lossless sampling on a reshaped target."""

import math
from dataclasses import dataclass

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import scaled
from cactus_theory.policies._base_classes import FixedTarget
from cactus_theory.policies._decisions import Budget, Declaration, Path
from cactus_theory.policies._policy import Rows, normalised_or
from cactus_theory.policies._registry import register


@register("tempered")
@dataclass(frozen=True)
class Tempered(FixedTarget):
    r"""Lossless sampling on :math:`h ∝ q^{1/T}`: the target at another temperature.

    The same as decoding at temperature T. Bounds no divergence, and may accept less than
    lossless sampling on q. As a baseline for lossy policies: arXiv 2607.08690.
    """

    temperature: float

    def __post_init__(self) -> None:
        value = check.number("temperature", self.temperature, 0, open_low=True)
        object.__setattr__(self, "temperature", value)

    @property
    def declares(self) -> Declaration:
        """Return: no budget; T = 1 is lossless."""
        return Declaration(strict=1.0)

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return q^(1/T) normalised; T = ∞ is uniform over the tokens with q > 0."""
        if self.temperature == 1:
            return q
        if self.temperature == math.inf:
            return normalised_or((q > 0).to(q.dtype), q)
        return scaled(q.log(), self.temperature).softmax(-1)


@register("truncated")
@dataclass(frozen=True)
class Truncated(FixedTarget):
    r"""Lossless sampling on q cut to its k likeliest tokens, its nucleus, or both.

    The nucleus is the smallest set of likeliest tokens with mass at least ``top_p``, so
    KL(h‖q) = −ln q(nucleus) ≤ −ln top_p. As a baseline for lossy policies: arXiv 2607.26627.
    """

    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        value = check.number("top_p", self.top_p, 0, 1, open_low=True)
        object.__setattr__(self, "top_p", value)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check.as_whole_number("top_k", self.top_k, 1))

    @property
    def declares(self) -> Declaration:
        """Return: the emitted KL within −ln top_p if only the nucleus cuts."""
        budget = Budget("kl", -math.log(self.top_p), "emitted") if self.top_k is None else None
        strict = 1.0 if self.top_k is None else None
        return Declaration(strict=strict, budget=budget, continuous=False)

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return the truncated q, renormalised; ties at the cut go to the smaller index."""
        if self.top_p == 1 and self.top_k is None:
            return q
        ranked, order = q.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        kept = (before < self.top_p) & (ranked > 0)
        if self.top_k is not None:
            kept[..., self.top_k :] = False
        chosen = torch.zeros_like(kept).scatter(-1, order, kept)
        return normalised_or(torch.where(chosen, q, 0.0), q)
