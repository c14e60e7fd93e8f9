"""The exact solution of the program that typical acceptance rounds."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies._base import (
    TIE,
    Id,
    Ids,
    Policy,
    Rows,
    keep_probability,
    one_hot,
)
from cactus_theory.policies._declaration import Declaration
from cactus_theory.policies._registry import register


@register("typical_exact")
@dataclass(frozen=True)
class TypicalExact(Policy):
    r"""Raise the drafted token as far as a bound on the cross-entropy allows.

    .. math:: \max_h h_n \quad\text{s.t.}\quad h \in \Delta,\; -\sum_i h_i \ln q_i \le c,
        \quad c = \max(-\ln ε,\; H(q) - \ln α)

    The solution puts 1 on n where −ln q_n ≤ c, else (c−m)/(−ln q_n − m), with the rest on the
    likeliest token (smallest index on ties), m = −ln max q. Whatever is refused is replaced by
    that token. ``typical`` rounds h_n to 0 or 1. alpha defaults to √ε. Where not even the
    likeliest token is within c, only that token is kept.
    """

    epsilon: float = 0.09
    alpha: float | None = None
    knob = "epsilon"
    shared_recovery = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.number("epsilon", self.epsilon, 0, 1))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check.number("alpha", self.alpha, 0))

    @property
    def declares(self) -> Declaration:
        """Return: no budget in a divergence; acceptance falls as the threshold rises."""
        return Declaration(direction=-1, continuous=False)

    def allowance(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return c of each row, in nats."""
        rows = q.double()
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = -torch.xlogy(rows, rows).sum(-1, keepdim=True)
        return (entropy - _log(alpha)).clamp(min=-_log(self.epsilon))

    def raised(self, q: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return h_n of every drafted token."""
        allowed = self.allowance(q)
        top, place = q.double().max(-1, keepdim=True)
        surprise, least = -q.gather(-1, n).double().log(), -top.log()
        excess = torch.where(surprise > least, surprise - least, 1.0)
        share = ((allowed - least) / excess).clamp(0.0, 1.0)
        share = torch.where(torch.isinf(surprise), 0.0, share)
        return torch.where((surprise <= allowed + TIE) | (n == _first_top(q, place)), 1.0, share)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, h_n/p_n)."""
        raised = self.raised(q, n)
        kept = keep_probability(raised, p.gather(-1, n).double())
        return torch.where(q.gather(-1, n) > 0, kept, 0.0)

    def recovery(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the one-hot row of the likeliest token."""
        q = q.double()
        return one_hot(q.argmax(-1), q)


def _first_top(q: Rows, place: Tensor) -> Tensor:
    return q.argmax(-1, keepdim=True).expand_as(place)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
