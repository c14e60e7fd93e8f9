"""Typical acceptance, the entropy-dependent threshold of Medusa and early vLLM."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows
from cactus_theory.base.reused_memory import scratch
from cactus_theory.divergences.classical import log_in_place
from cactus_theory.policies._decisions import Decision, Declaration, Residual
from cactus_theory.policies._policy import (
    TIE,
    Entries,
    Flags,
    Flat,
    FlatCoins,
    FlatIds,
    Ids,
    Rows,
    accept_probability,
    one_hot,
)
from cactus_theory.policies._registry import register
from cactus_theory.policies._shortcuts import Shortcuts
from cactus_theory.policies.top_k import AcceptedSet


@dataclass(frozen=True)
class Above(Shortcuts):
    """Shortcuts of a policy that accepts every token with q_n > ``threshold``."""

    threshold: float

    def accepted(self, q_n: Entries, p_n: Entries, coin: Entries) -> Flags:
        """Return q_n > threshold."""
        return q_n > self.threshold


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

    @property
    def shortcuts(self) -> Shortcuts:  # type: ignore[override]
        """Return the largest threshold of any row, ε, for the rounded form."""
        return Above(self.epsilon * (1 + TIE)) if self.form == "rounded" else Shortcuts()

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as the threshold rises."""
        return Declaration(direction=-1, continuous=False)

    def threshold(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return min(ε, α e^{−H(q)}) of each row."""
        rows = q.double()
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = -torch.xlogy(rows, rows).sum(-1, keepdim=True)
        return (alpha * (-entropy).exp()).clamp(max=self.epsilon)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return the tokens where q exceeds the threshold, (..., V)."""
        return q.double() > self.threshold(q) * (1 + TIE)

    def allowance(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return the allowed surprise c of each row, in nats (``form=exact``)."""
        rows = q.double()
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = -torch.xlogy(rows, rows).sum(-1, keepdim=True)
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
            return super().acceptance(q, p, n)
        q, p = float64_rows(q, p)
        accepted = accept_probability(self.raised(q, n), p.gather(-1, n))
        return torch.where(q.gather(-1, n) > 0, accepted, 0.0)

    def decide(self, q: Flat, p: Flat, n: FlatIds, coin: FlatCoins) -> Decision:
        """Return q_n > min(ε, α e^{−H}); a row whose q_n exceeds ε need not be read."""
        if self.form == "exact":
            return super().decide(q, p, n, coin)
        q_n = q.gather(-1, n[:, None])[:, 0].double()
        accepted = self.shortcuts.accepted(q_n, q_n, coin)
        if q.is_cuda or not bool(accepted.all()):
            alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
            accepted = accepted | (q_n > alpha * (-_entropy(q)).exp() * (1 + TIE))
        if not accepted.is_cuda and bool(accepted.all()):
            return Decision(accepted, None)
        rows = one_hot(q.argmax(-1), q) if self.recover == "argmax" else q
        return Decision(accepted, Residual(rows=rows))


def _entropy(q: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
    """Return H(q) of rows in nats, computed in the rows' own precision and in reused memory."""
    logs = scratch("typical.logs", tuple(q.shape), q.dtype, q.device)
    torch.clamp(q, min=torch.finfo(q.dtype).tiny, out=logs)  # 0·ln 0 is 0
    return -log_in_place(logs).mul_(q).sum(-1).double()


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
