"""Policies whose acceptance reads the target's row q alone, and not the draft's row p."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base.tensors import float64_rows, ungraphed
from cactus_theory.base.tolerances import DECIDED
from cactus_theory.divergences.classical import log_in_place
from cactus_theory.optimum.band_row import loops
from cactus_theory.policies._base_classes import SharedResidual
from cactus_theory.policies.claims import Budget, Declaration
from cactus_theory.policies.knob_values import Count, NotNegative, Share
from cactus_theory.policies.policy import (
    TIE,
    Entries,
    Id,
    Ids,
    Policy,
    Rows,
    accept_probability,
    normalised_or,
    one_hot,
)
from cactus_theory.policies.registry import register


class AcceptedSet(SharedResidual):
    """Accept drafted token n iff n is in a set of tokens that depends on q alone.

    ``recover`` says what replaces a rejected token: ``argmax`` the likeliest token of q (the
    smallest index on ties), ``target`` a draw from q, ``accepted`` a draw from q among the accepted
    tokens.
    """

    recover: Any = "argmax"  # or "target", "accepted"

    @abstractmethod
    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n): 1 for drafted tokens n in the set, 0 for all other drafted tokens."""
        return self.chosen(ungraphed(q)).gather(-1, n).double()

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return, by ``recover``, the one-hot row of the likeliest token, q, or q on the set."""
        if self.recover == "argmax":
            return one_hot(q.argmax(-1), q).double()
        (q,) = float64_rows(q)
        if self.recover == "target":
            return q
        return normalised_or(torch.where(self.chosen(q), q, 0.0), q)


def among_likeliest(q: Rows, k: int) -> Bool[Tensor, "*batch vocab"]:
    """Return which tokens with q > 0 are among the k likeliest, ties at the k-th place included."""
    likeliest = q.topk(min(k, q.shape[-1]), -1).values
    return (q >= likeliest[..., -1:]) & (q > 0)


@register("relaxed")
@dataclass(frozen=True)
class Relaxed(AcceptedSet):
    r"""Accept drafted token n iff n is among the k likeliest and :math:`0 < q_n ≥ \max q − δ`.

    ``recover`` says what replaces a rejected token (:class:`AcceptedSet`). No divergence is
    bounded, the emitted law need not lie between p and q, and the acceptance may be below that of
    lossless sampling. At k = 1 the likeliest token alone is accepted, which is lossless only for a
    greedy target. All tokens that tie for the k-th place are accepted; engines accept exactly k.

    Engines use this rule only in a model's thinking section; the schedule
    ``Between(relaxed, opening=…, closing=…)`` does the same. Values of (k, delta) are (1, 0) in
    TensorRT-LLM and (10, 0.01) in an example there, (10, 0.6) in Modular MAX, and in ATOM (10, 0.6)
    if a request sets the option, else (8, 0.5). TensorRT-LLM and ATOM emit the likeliest token
    after a rejection (``recover=argmax``). Both also accept tokens of probability 0 if δ admits
    such tokens; this policy does not. Source: documentation of ``MTPDecodingConfig``
    (TensorRT-LLM) and ``SpeculativeConfig`` (MAX), ``rejection_sampler.py`` (ATOM).

    Parameters
    ----------
    k : number of likeliest tokens that may be accepted.
    delta : the distance δ ≥ 0 from the largest probability up to which tokens are accepted.
    recover : the replacement of a rejected token.
    """

    k: Count = 10
    delta: NotNegative = 0.6
    recover: Literal["argmax", "target", "accepted"] = "target"
    knob = "delta"

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance grows with δ."""
        return Declaration(direction=1, continuous=False)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""
        rows = q.double()
        least = rows.amax(-1, keepdim=True) * (1 - TIE) - self.delta
        return among_likeliest(q, self.k) & (rows >= least)


@register("top_k")
@dataclass(frozen=True)
class TopK(AcceptedSet):
    """Accept drafted token n iff n is among the target's k likeliest (ties included, q_n > 0).

    A rejected token is replaced by a draw from q among these k tokens. (The published code draws
    among them in proportion to 1 − p, and also accepts tokens with q = 0 if fewer than k tokens
    have q > 0.) Source: the top-k baseline of Hao & Mou 2026 (arXiv 2604.04987) and its repository.

    Parameters
    ----------
    k : number of likeliest tokens that are accepted.
    """

    k: Count
    recover = "accepted"
    knob = "k"

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance grows with k."""
        return Declaration(direction=1, continuous=False)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""
        return among_likeliest(q, self.k)


@register("typical")
@dataclass(frozen=True)
class Typical(AcceptedSet):
    r"""Accept drafted token n iff :math:`q_n > \min(ε, α e^{-H(q)})`; p is not read.

    A rejected token is replaced by the likeliest token of q (smallest index on ties) or by a draw
    from q. No divergence is bounded, the emitted law need not lie between p and q, and acceptance
    may be below that of lossless sampling. If α ≤ 1, every accepted token n has −ln q_n below
    max(−ln ε, H(q) − ln α) (THEORY.md, Theorem 27).
    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section 2.3.1.

    Parameters
    ----------
    epsilon : ε, the largest threshold.
    alpha : α, the factor of the threshold that falls with the entropy H(q); by default √ε.
    recover : the replacement of a rejected token, as in :class:`AcceptedSet`.
    """

    epsilon: Share = 0.09
    alpha: NotNegative | None = None
    recover: Literal["argmax", "target"] = "argmax"
    knob = "epsilon"

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return the bounds on φ(n): 1 and 1 if q_n > ε (no threshold exceeds ε), else 0 and 1."""
        return (q_n > self.epsilon * (1 + TIE)).double(), torch.ones_like(q_n)

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as the threshold rises."""
        return Declaration(direction=-1, continuous=False)

    def threshold(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return the acceptance threshold min(ε, α e^{−H(q)}) of each row."""
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        return (alpha * (-_entropy(q)).exp()).clamp(max=self.epsilon)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return 1 where q_n exceeds the row's threshold, else 0, from q_n and the entropy of q."""
        q = ungraphed(q)
        return (q.gather(-1, n).double() > self.threshold(q) * (1 + TIE)).double()

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return the tokens where q exceeds the threshold, (..., V)."""
        return q.double() > self.threshold(q) * (1 + TIE)


def _entropy(q: Rows) -> Float[Tensor, "*batch 1"]:
    """Return the entropy H(q) of each row in nats, float64."""
    if not q.is_cuda and q.numel() and q.dtype in DECIDED and (compiled := loops()) is not None:
        rows = ungraphed(q).reshape(-1, q.shape[-1]).numpy()
        entropies = [compiled.entropy_of(row) for row in rows]
        return torch.tensor(entropies, dtype=torch.float64, device="cpu").view(*q.shape[:-1], 1)
    q = q.double()
    logs = log_in_place(q.clamp(min=torch.finfo(q.dtype).tiny))  # 0·ln 0 is 0
    return -logs.mul_(q).sum(-1, keepdim=True)


@register("thresholds")
@dataclass(frozen=True)
class Thresholds(Policy):
    r"""Accept n with probability :math:`\min(1, q_n/a)`, and always where :math:`q_n ≥ s`.

    .. math:: g(x|n) = q_x 1[x ≠ n]/(1 − q_n)

    is the law of the recovered token x after n was rejected. Draft probabilities are not read. With
    a = s = 1 (SGLang's defaults) the policy in effect draws a token from q, and accepts the drafted
    token iff it equals the drawn one. Every decoder that compares drafts with samples does so.
    This is lossless for any draft, with the acceptance Σ p q ≤ 1 − TV(p, q). For smaller a or s the
    emitted law has :math:`h_x ≤ q_x/\min(a, s)`, since φ_n ≤ q_n/min(a, s) and a token x is
    recovered with probability at most :math:`q_x Σ_{n≠x} p_n (1 − φ_n)/(1 − q_n) ≤ q_x (1 − p_x)`.
    All this holds for deterministic drafts, too.

    SGLang tests coin ≤ q_n/a, and so emitted tokens of probability 0 if the coin was 0
    (sglang#35771). Here the test is strict, and such tokens are rejected at s = 0, too. Source:
    ``speculative_sampling.cuh``, ``--speculative-accept-threshold-single`` and ``-acc``.

    Parameters
    ----------
    single : s; a token with q_n ≥ s is always accepted.
    acc : a, the divisor of q_n for tokens with q_n < s.
    """

    single: Share = 1.0
    acc: Share = 1.0
    knob = "acc"

    @property
    def declares(self) -> Declaration:
        """Return: max-divergence of h from q at most −ln min(acc, single)."""
        least = min(self.single, self.acc)
        return Declaration(
            direction=-1,  # a larger ``acc`` accepts less
            strict=1.0 if self.single == 1 else None,  # φ = q_n at acc = single = 1
            budget=Budget("max_divergence", math.log(1 / least), "emitted") if least else None,
            between=least == 1,
            # φ jumps to 1 at q_n = single < 1, and at q_n = 0 if ``acc`` is 0
            continuous=self.single == 1 and self.acc > 0,
        )

    def accept_entries(self, q_n: Entries) -> Entries:
        """Return the acceptance φ(n) from float64 entries q_n."""
        sure = (q_n >= self.single) & (q_n > 0)
        accepted = accept_probability(q_n, torch.full_like(q_n, self.acc))
        return torch.where(sure, 1.0, accepted)

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return φ(n) as lower and as upper bound, since φ(n) depends on q_n alone."""
        return (accepted := self.accept_entries(q_n)), accepted

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return the acceptance φ(n), which depends on q_n alone."""
        return self.accept_entries(ungraphed(q).gather(-1, n).double())

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return q with 0 at n, divided by its sum; q itself where q is one-hot at n."""
        (q,) = float64_rows(q)
        return normalised_or(q.scatter(-1, n[..., None], 0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return the emitted law in O(V) per row.

        h_x = p_x φ_x + q_x Σ p_n(1 − φ_n)/(1 − q_n), where the sum is over all tokens n but x.
        """
        q, p = float64_rows(q, p)
        if min(self.single, self.acc) == 1:
            return q
        phi = self.accept_entries(q)
        left = p * (1 - phi) / (q.sum(-1, keepdim=True) - q)
        left = torch.where(phi < 1, left, 0.0)
        return p * phi + q * (left.sum(-1, keepdim=True) - left).clamp(min=0.0)
