"""The optimum under an honest budget, as a policy."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory import optimum
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies._base import (
    FixedTarget,
    Id,
    Ids,
    Rows,
    keep_probability,
    normalised_or,
)
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._registry import register


@register("band")
@dataclass(frozen=True)
class Band(FixedTarget):
    r"""Verify against the best row within the budget: :math:`h = \mathrm{clip}(p, aq, bq)`.

    By ``delta`` every row may spend that much divergence; by ``price`` every row spends until
    one more unit of divergence buys less than that much acceptance, which is the best way to
    share a budget among rows. Keep n with min(1, b q_n/p_n). Source: theorem in
    ``cactus_theory.optimum``; for reverse_kl this is mentored decoding (Tran-Thien 2023).
    """

    delta: float | None = None
    price: float | None = None
    divergence: str = "kl"

    def __post_init__(self) -> None:
        kind = find_divergence(self.divergence)
        name, amount, _ = optimum.chosen_knob(kind, delta=self.delta, price=self.price)
        object.__setattr__(self, name, check.number(name, amount, 0))
        object.__setattr__(self, "divergence", kind.spec)

    @property
    def knob(self) -> str:  # type: ignore[override]
        """Return the knob in use, delta or price."""
        return "price" if self.delta is None else "delta"

    @property
    def declares(self) -> Declaration:
        """Return: the emitted divergence within delta, or no bound when priced."""
        if self.delta is None:
            return Declaration(-1, math.inf, None, between=True, at_least_speculative=True)
        budget = Budget(self.divergence, self.delta, "emitted")
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True, optimal=True)

    def edges(self, q: Rows, p: Rows) -> tuple[Tensor, Tensor]:
        """Return (a, b) of each row, (..., 1): without a sort where Newton settles, else sorted.

        b = ∞ and a = 0 stand for h = p.
        """
        flat_q, flat_p = (row.double().reshape(-1, row.shape[-1]) for row in (q, p))
        found = optimum.edges(flat_q, flat_p, self.divergence, delta=self.delta, price=self.price)
        shape = (*q.shape[:-1], 1)
        return found[0].reshape(shape), found[1].reshape(shape)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return clip(p, aq, bq), nothing where q = 0."""
        q, p = q.double(), p.double()
        lower, upper = self.edges(q, p)
        ceiling = torch.where(q > 0, upper * torch.where(q > 0, q, 1.0), 0.0)
        return torch.minimum(torch.maximum(p, lower * q), ceiling)

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, b q_n/p_n); only the upper edge is needed."""
        if p is None:
            return super().acceptance(q, p, n)
        return _kept(self.edges(q, p)[1], q, p, n)

    def decide(
        self, q: Rows, p: Rows | None, n: Id
    ) -> tuple[Float[Tensor, "*batch"], Callable[[Bool[Tensor, "*batch"]], Tensor]]:
        """Return φ and the recovery rows ∝ (aq − p)₊ from edges that are solved once."""
        if p is None:
            return super().decide(q, p, n)
        lower, upper = self.edges(q, p)

        def recover(refused: Tensor) -> Tensor:
            own_q, own_p = q[refused].double(), p[refused].double()
            return normalised_or((lower[refused] * own_q - own_p).clamp(min=0.0), own_q)

        return _kept(upper, q, p, n[..., None])[..., 0], recover


def _kept(upper: Tensor, q: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """Return min(1, b q_n/p_n), 0 where q_n = 0."""
    q_n, p_n = q.gather(-1, n).double(), p.gather(-1, n).double()
    ceiling = torch.where(q_n > 0, upper * torch.where(q_n > 0, q_n, 1.0), 0.0)
    return keep_probability(ceiling, p_n)
