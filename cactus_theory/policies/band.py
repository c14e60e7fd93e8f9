"""The optimum under an honest budget, as a policy."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.band import Band as SolvedBand
from cactus_theory.band import Geometry, chosen_knob, solve_band
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies._base import FixedTarget, Ids, Rows, keep_probability
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._registry import register


@register("band")
@dataclass(frozen=True)
class Band(FixedTarget):
    r"""Verify against the best row within the budget: :math:`h = \mathrm{clip}(p, aq, bq)`.

    By ``delta`` every row may spend that much divergence; by ``price`` every row spends until
    one more unit of divergence buys less than that much acceptance, which is the best way to
    share a budget among rows. Keep n with min(1, b q_n/p_n). Source: theorem in
    ``cactus_theory.band``; for reverse_kl this is mentored decoding (Tran-Thien 2023).
    """

    delta: float | None = None
    price: float | None = None
    divergence: str = "kl"

    def __post_init__(self) -> None:
        kind = find_divergence(self.divergence)
        name, amount, _ = chosen_knob(kind, delta=self.delta, price=self.price)
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
        return Declaration(1, 0.0, budget, between=True, at_least_speculative=True)

    def solve(self, q: Rows, p: Rows) -> SolvedBand:
        """Return the solved bands of rows flattened to (R, V)."""
        kind = find_divergence(self.divergence)
        flat_q, flat_p = (row.double().reshape(-1, row.shape[-1]) for row in (q, p))
        amount = getattr(self, self.knob)
        amounts = torch.full(flat_q.shape[:1], amount, dtype=torch.float64, device=q.device)
        return solve_band(Geometry(flat_q, flat_p, kind, "target"), self.knob, amounts)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return clip(p, aq, bq)."""
        return self.solve(q, p).rows().reshape(q.shape)

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, b q_n/p_n); only the upper edge is needed."""
        if p is None:
            return super().acceptance(q, p, n)
        band = self.solve(q, p)
        edge = torch.where(band.strict, 1.0, band.point.upper).reshape(*q.shape[:-1], 1)
        whole = (band.point.rejection <= 0).reshape(*q.shape[:-1], 1) & ~band.strict.reshape(
            edge.shape
        )
        q_n, p_n = q.gather(-1, n).double(), p.gather(-1, n).double()
        phi = keep_probability(torch.where(q_n > 0, edge * q_n, 0.0), p_n)
        return torch.where(whole & (q_n > 0), 1.0, phi)
