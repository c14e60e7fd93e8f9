r"""Regret: the charge at temperature 0, where rows of the target are one-hot and KL is 0 or ∞.

.. math:: ρ_n = \max \ln q − \ln q_n, \qquad D_ρ(h) = \sum_n h_n ρ_n

in nats, with q the target's row at temperature 1. D_ρ is the limit of T KL(h‖q_T) as T → 0, with
q_T the row at temperature T (THEORY.md, Theorem 30). Regret is not in the registry of divergences:
D_ρ is 0 for every h on the likeliest tokens, and in general not for h = q.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.divergences.definition import Divergence


def regrets(q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Return ρ of every token, float64: ∞ where q = 0, NaN for a whole row with NaN."""
    logs = q.double().log()
    return logs.amax(-1, keepdim=True) - logs


@dataclass(frozen=True)
class Regret(Divergence):
    """D_ρ(h) of a row h, in nats: ∞ if h emits a token that the target excludes."""

    name = "regret"
    linear = True

    def value(self, emitted: Tensor, target: Tensor) -> Tensor:
        h, q = tensors.float64_rows(emitted, target)
        return torch.where(h > 0, h * regrets(q), 0.0).sum(-1)

    def from_ceiling(self, ratio: Tensor) -> Tensor:
        """Raise ValueError: a budget of regret bounds no h/q; use ``ct.optimal_regret``."""
        raise ValueError("divergence: regret has a program of its own, ct.optimal_regret")


REGRET = Regret()
