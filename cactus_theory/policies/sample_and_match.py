"""Draw from the target and accept the drafted token if it is the same, or by its entry alone."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.policies._decisions import Budget, Declaration
from cactus_theory.policies._policy import (
    Entries,
    Id,
    Ids,
    Policy,
    Rows,
    accept_probability,
    normalised_or,
)
from cactus_theory.policies._registry import register


@register("sample_and_match")
@dataclass(frozen=True)
class SampleAndMatch(Policy):
    r"""Draw x from q by itself and emit it; the drafted token is accepted iff it is x.

    .. math:: φ(n) = q_n, \qquad g(x|n) = q_x 1[x ≠ n]/(1 − q_n)

    Lossless, whatever the draft; accepts :math:`Σ p_i q_i ≤ 1 − \mathrm{TV}(p, q)`, which is
    what lossless sampling gains by looking at p. The way of engines without rejection sampling,
    and of any decode that compares drafts with the target's own samples.
    """

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return φ: the rest of the row is not needed."""
        return (accepted := self.accept_entries(q_n)), accepted

    @property
    def declares(self) -> Declaration:
        """Return: lossless; accepts Σ p q, at most what speculative does."""
        return Declaration(budget=Budget("kl", 0.0, "emitted"), between=True)

    def accept_entries(self, q_n: Entries) -> Entries:
        """Return φ from float64 entries of q: themselves."""
        return q_n

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ, which reads q_n alone."""
        return self.accept_entries(ungraphed(q).gather(-1, n).double())

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return q without n, normalised; q where n is deterministic."""
        (q,) = float64_rows(q)
        return normalised_or(q.scatter(-1, n[..., None], 0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return q itself."""
        return float64_rows(q)[0]


@register("thresholds")
@dataclass(frozen=True)
class Thresholds(SampleAndMatch):
    r"""Accept n with probability :math:`\min(1, q_n/a)`, and surely from :math:`q_n ≥ s` on.

    .. math:: g(x|n) = q_x 1[x ≠ n]/(1 − q_n)

    with a = ``acc`` and s = ``single``; draft probabilities are not read. At 1, 1 (SGLang's
    defaults) this is ``sample_and_match``: lossless, and Σ p q is accepted. Below,
    :math:`h_x ≤ q_x/\min(a, s)`: φ ≤ q/min(a, s), and of what is refused x takes at most
    :math:`q_x Σ_n p_n (1 − φ_n)/(1 − q_n) ≤ q_x`. The same for deterministic drafts.

    The engine tests coin ≤ q/a and so emitted tokens of probability 0 at coin 0 (sglang#35771);
    here the test is strict, and they are refused at s = 0 too. Source:
    ``speculative_sampling.cuh``, ``--speculative-accept-threshold-single`` and ``-acc``.
    """

    single: float = 1.0
    acc: float = 1.0
    knob = "acc"

    def __post_init__(self) -> None:
        for name in ("single", "acc"):
            object.__setattr__(self, name, check.number(name, getattr(self, name), 0, 1))

    @property
    def declares(self) -> Declaration:
        """Return: the emitted max-divergence within −ln min(acc, single)."""
        least = min(self.single, self.acc)
        return Declaration(
            direction=-1,
            strict=1.0 if self.single == 1 else None,
            budget=Budget("max_divergence", math.log(1 / least), "emitted") if least else None,
            between=least == 1,
            continuous=self.single == 1 and self.acc > 0,
        )

    def accept_entries(self, q_n: Entries) -> Entries:
        """Return φ from float64 entries of q."""
        sure = (q_n >= self.single) & (q_n > 0)
        accepted = accept_probability(q_n, torch.full_like(q_n, self.acc))
        return torch.where(sure, 1.0, accepted)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return pφ + q·Σ_n p_n(1 − φ_n)/(1 − q_n), the sum over all other tokens n, O(V) a row."""
        q, p = float64_rows(q, p)
        phi = self.accept_entries(q)
        left = p * (1 - phi) / (q.sum(-1, keepdim=True) - q)
        left = torch.where(phi < 1, left, 0.0)
        return p * phi + q * (left.sum(-1, keepdim=True) - left).clamp(min=0.0)
