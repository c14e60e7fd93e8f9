"""Typical acceptance, the entropy-dependent threshold of Medusa and early vLLM."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.divergences.classical import log_in_place
from cactus_theory.optimum.rows import loops
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._policy import (
    TIE,
    Entries,
    Ids,
    Rows,
    accept_probability,
)
from cactus_theory.policies._registry import register
from cactus_theory.policies.accepted_sets import AcceptedSet


@register("typical")
@dataclass(frozen=True)
class Typical(AcceptedSet):
    r"""Accept n iff :math:`q_n > \min(ε, α e^{-H(q)})`, whatever its draft probability.

    Recovers the most likely token of q (smallest index on ties) or a draw from q. Bounds
    no divergence, is not between p and q, and may accept less than lossless sampling.
    alpha defaults to √ε. Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section 2.3.1.

    With ``form=exact`` it solves the program that this rounds to 0 or 1: it raises the drafted
    token as far as a bound on the cross-entropy allows.

    .. math:: \max_h h_n \quad\text{s.t.}\quad h \in \Delta,\; -\sum_i h_i \ln q_i \le c,
        \quad c = \max(-\ln ε,\; H(q) - \ln α)

    The solution puts 1 on n where −ln q_n ≤ c, else (c−m)/(−ln q_n − m), with the rest on the
    likeliest token (smallest index on ties), m = −ln max q. Whatever is refused is replaced by
    that token. Where not even the likeliest token is within c, only that token is accepted.
    """

    epsilon: float = 0.09
    alpha: float | None = None
    recover: str = "argmax"
    form: str = "rounded"
    knob = "epsilon"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.number("epsilon", self.epsilon, 0, 1))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check.number("alpha", self.alpha, 0))
        check.one_of("form", self.form, ("rounded", "exact"))
        admitted = ("argmax", "target") if self.form == "rounded" else ("argmax",)
        check.one_of("recover", self.recover, admitted)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return 1 above ε, the largest threshold of any row, for the rounded form."""
        sure = (self.form == "rounded") & (q_n > self.epsilon * (1 + TIE))
        return sure.double(), torch.ones_like(q_n)

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as the threshold rises."""
        return Declaration(direction=-1, continuous=False)

    def threshold(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return min(ε, α e^{−H(q)}) of each row."""
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = _entropy(q)
        return (alpha * (-entropy).exp()).clamp(max=self.epsilon)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return the tokens where q exceeds the threshold, (..., V)."""
        return q.double() > self.threshold(q) * (1 + TIE)

    def allowance(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return the allowed surprise c of each row, in nats (``form=exact``)."""
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = _entropy(q)
        return (entropy - _log(alpha)).clamp(min=-_log(self.epsilon))

    def raised(self, q: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return h_n of every drafted token (``form=exact``)."""
        allowed = self.allowance(q)
        surprise, least = -q.gather(-1, n).double().log(), -q.double().amax(-1, keepdim=True).log()
        excess = torch.where(surprise > least, surprise - least, 1.0)
        share = ((allowed - least) / excess).clamp(0.0, 1.0)
        share = torch.where(torch.isinf(surprise), 0.0, share)
        return torch.where(
            (surprise <= allowed + TIE) | (n == q.argmax(-1, keepdim=True)), 1.0, share
        )

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return 1 for the tokens above the threshold, or min(1, h_n/p_n)."""
        if self.form == "rounded":
            q_n = ungraphed(q).gather(-1, n).double()
            return (q_n > self.threshold(ungraphed(q)) * (1 + TIE)).double()
        q, p = float64_rows(q, p)
        accepted = accept_probability(self.raised(q, n), p.gather(-1, n))
        return torch.where(q.gather(-1, n) > 0, accepted, 0.0)


def _entropy(q: Rows) -> Float[Tensor, "*batch 1"]:
    """Return H(q) of rows in nats, float64."""
    if not q.is_cuda and q.numel() and q.dtype in DECIDED and (compiled := loops()) is not None:
        rows = ungraphed(q).reshape(-1, q.shape[-1]).numpy()
        found = [compiled.entropy_of(row) for row in rows]
        return torch.tensor(found, dtype=torch.float64, device="cpu").view(*q.shape[:-1], 1)
    q = q.double()
    logs = log_in_place(q.clamp(min=torch.finfo(q.dtype).tiny))  # 0·ln 0 is 0
    return -logs.mul_(q).sum(-1, keepdim=True)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
