"""Lossless sampling, lenience and mixtures: accept at least as often as lossless sampling does.

All these policies draw a recovered token as lossless sampling does, from (q − p)₊ normalised.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from cactus_theory.base.tensors import float64_rows, ungraphed
from cactus_theory.optimum.band_row import NodeRow
from cactus_theory.policies._base_classes import Entrywise, FixedTarget
from cactus_theory.policies.claims import Budget, Declaration, Support
from cactus_theory.policies.knob_values import PositiveShare, Share
from cactus_theory.policies.policy import Entries, PathState, Rows, normalised_or
from cactus_theory.policies.registry import register
from cactus_theory.policies.tilt import Tilted


class Raised(Tilted, Entrywise, FixedTarget):
    r"""Policies with φ(n) = min(1, c/p_n), c ≥ q_n, and the residual (q − p)₊ of lossless sampling.

    The emitted law is min(p, c) + (1 − A)(q − p)₊/TV(p, q) with the acceptance A = Σ min(p, c). It
    lies pointwise between p and q. Lossless sampling with this law as target accepts as often.
    """

    between = True

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the emitted law, float64 if q and p have different dtypes."""
        q, p = map(ungraphed, (q, p)) if q.dtype == p.dtype else float64_rows(q, p)
        accepted = torch.minimum(p, self.ceiling(q, p))
        lost = (p - accepted).sum(-1, keepdim=True)
        left = (q - p).clamp_(min=0.0)
        total = left.sum(-1, keepdim=True)
        # on a GPU a look at the flags would wait for the device
        if left.is_cuda or not bool((total > 0).all()):
            return normalised_or(left, q).mul_(lost).add_(accepted)
        return left.mul_(lost / total).add_(accepted)


@register("speculative")
@dataclass(frozen=True)
class Speculative(Raised):
    """Accept n with min(1, q_n/p_n): lossless sampling, whose emitted law is exactly q.

    Source: Leviathan et al. 2023; Chen et al. 2023.
    """

    highest = 1.0

    @property
    def declares(self) -> Declaration:
        """Return: lossless."""
        budget = Budget("kl", 0.0, "emitted")
        return Declaration(budget=budget, between=True, at_least_speculative=True)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the ceiling c = q_n."""
        return q_n

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return q_n/p_n as lower and as upper bound, since h_n = q_n."""
        ratio = (q_n / p_n).nan_to_num(nan=0.0)
        return ratio, ratio

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> NodeRow:
        """Return the solver of a node's row, which is h = q."""
        return NodeRow(alive)

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the row that is emitted, q."""
        return q


@register("lenience")
@dataclass(frozen=True)
class Lenience(Raised):
    r"""Accept n with :math:`\min(1, q_n/(ℓ p_n))`, 0 < ℓ ≤ 1.

    The emitted law has :math:`h_n ≤ q_n/ℓ` for every token n, and no policy with this bound accepts
    more: Σ min(p, q/ℓ) is the largest acceptance within a max-divergence of −ln ℓ from q.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5.

    Parameters
    ----------
    lenience : ℓ; 1 is lossless, and smaller values accept more.
    """

    lenience: PositiveShare
    knob = "lenience"

    @property
    def declares(self) -> Declaration:
        """Return: max-divergence of h from q at most −ln ℓ; no policy within it accepts more."""
        budget = Budget("max_divergence", -math.log(self.lenience), "emitted")
        return Declaration(-1, 1.0, budget, between=True, at_least_speculative=True, optimal=True)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the ceiling c = q_n/ℓ."""
        return q_n / self.lenience


@register("mixture")
@dataclass(frozen=True)
class Mixture(Raised):
    r"""Sample losslessly towards the mixture :math:`h = αp + (1−α)q`.

    TV(h, q) = α TV(p, q), and no policy with at most this total variation accepts more than
    1 − (1−α) TV(p, q). By default tokens that the target excludes are rejected; the mass they
    would have in h goes to tokens with q > p, in proportion to (q − p)₊. Hugging Face's
    ``assistant_ensemble_weight`` is 1 − α, with ``support=free``. Source: the interpolation
    baseline of Hao & Mou 2026 (arXiv 2604.04987).

    Parameters
    ----------
    alpha : α, the draft's share of h; 0 is lossless.
    support : ``free``, as published, emits tokens that the target excludes; ``target`` does not.
    """

    alpha: Share
    support: Support = "target"
    knob = "alpha"

    @property
    def declares(self) -> Declaration:
        """Return: total variation between h and q at most α."""
        budget = Budget("total_variation", self.alpha, "emitted")
        return Declaration(
            1, 0.0, budget, between=True, at_least_speculative=True, support=self.support
        )

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return the ceiling c = αp_n + (1−α)q_n; with ``support=target`` 0 where q_n = 0."""
        mixed = self.alpha * p_n + (1 - self.alpha) * q_n
        return mixed if self.support == "free" else torch.where(q_n > 0, mixed, 0.0)
