"""The optimum under an honest budget, as a policy."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory._edges import Edges, edges_for_budget, edges_for_kl_price
from cactus_theory.band import Geometry, chosen_knob, solve_band
from cactus_theory.divergences import KL, Divergence, FDivergence, Renyi
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.optimum.decide import LEAST, Judged, decide_at_budget, decide_at_price
from cactus_theory.policies._base import FixedTarget, Ids, Rows, keep_probability
from cactus_theory.policies._declaration import Budget, Declaration
from cactus_theory.policies._registry import register
from cactus_theory.policies._residual import Decision, Residual

# below, the divergence of float32 rows is mostly rounding
LEAST_BUDGET = 1e-6
LEAST_PRICE = 0.01  # e^{1/price} is finite down to 0.0015


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
    keeps_what_lossless_keeps = True

    def __post_init__(self) -> None:
        kind = find_divergence(self.divergence)
        name, amount, _ = chosen_knob(kind, delta=self.delta, price=self.price)
        object.__setattr__(self, name, check.number(name, amount, 0))
        object.__setattr__(self, "divergence", kind.spec)

    @cached_property
    def kind(self) -> Divergence:
        """Return the divergence."""
        return find_divergence(self.divergence)

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
        found = self._newton(flat_q, flat_p)
        if found is None:
            lower, upper = self._sorted(flat_q, flat_p)
        else:
            lower, upper = found.lower, found.upper
            left = (~found.done).nonzero()[:, 0]
            if len(left):
                lower[left], upper[left] = self._sorted(flat_q[left], flat_p[left])
        shape = (*q.shape[:-1], 1)
        return lower.reshape(shape), upper.reshape(shape)

    @property
    def _amount(self) -> float:
        return getattr(self, self.knob)

    def _newton(self, q: Rows, p: Rows) -> Edges | None:
        kind = self.kind
        if self._amount == math.inf:
            return None
        if self.knob == "price":
            if isinstance(kind, KL) and self._amount > LEAST_PRICE:
                return edges_for_kl_price(q, p, self._amount)
            return None
        delta = torch.full((q.shape[0],), self._amount, dtype=torch.float64, device=q.device)
        if isinstance(kind, Renyi):
            kind, delta = kind.generator, kind.to_alpha(delta)
        if not isinstance(kind, FDivergence) or not kind.smooth:
            return None
        return edges_for_budget(q, p, kind, delta)

    def _sorted(self, q: Rows, p: Rows) -> tuple[Tensor, Tensor]:
        amounts = torch.full(q.shape[:1], self._amount, dtype=torch.float64, device=q.device)
        geometry = Geometry(q, p, self.kind, "target")
        band = solve_band(geometry, self.knob, amounts)
        whole = (band.point.rejection <= 0) & ~band.strict
        lower = torch.where(band.strict, 1.0, band.point.lower)
        upper = torch.where(band.strict, 1.0, band.point.upper)
        return torch.where(whole, 0.0, lower), torch.where(whole, torch.inf, upper)

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return clip(p, aq, bq), nothing where q = 0."""
        q, p = q.double(), p.double()
        lower, upper = self.edges(q, p)
        ceiling = torch.where(q > 0, upper * torch.where(q > 0, q, 1.0), 0.0)
        return torch.minimum(torch.maximum(p, lower * q), ceiling)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, b q_n/p_n); only the upper edge is needed."""
        q_n, p_n = q.gather(-1, n).double(), p.gather(-1, n).double()
        return _kept(self.edges(q, p)[1], q_n, p_n)

    def decide(
        self,
        q: Float[Tensor, "rows vocab"],
        p: Float[Tensor, "rows vocab"],
        n: Int[Tensor, "rows"],
        coin: Float[Tensor, "rows"],
    ) -> Decision:
        """Return coin < b q_n/p_n and the scale a.

        At a price neither edge is solved unless the token is refused; see
        :mod:`cactus_theory.optimum.decide`.
        """
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        if q.dtype not in LEAST:
            q, p = q.float(), p.float()
        if not self._decides_in_place(q):
            lower, upper = (edge[:, 0] for edge in self.edges(*map(check.normalised, (q, p))))
            return Decision(coin < _kept(upper, q_n, p_n), Residual(scale=lower))
        ratio = torch.where(q_n > 0, coin * p_n / q_n, math.inf).tolist()
        found = self._judged(q, p, ratio)
        lower = torch.tensor(found.lower, dtype=torch.float64)
        return Decision(torch.tensor(found.kept), Residual(scale=lower))

    def _decides_in_place(self, q: Rows) -> bool:
        """Return whether the band needs no solving: by price or float32, away from the ends."""
        generator = self._generator
        if generator is None or not generator.smooth or q.is_cuda:
            return False
        if self.price is not None:
            return 0 < self.price < math.inf and isinstance(self.kind, FDivergence)
        return q.dtype == torch.float32 and LEAST_BUDGET < self._amount < math.inf

    def _judged(self, q: Rows, p: Rows, ratio: list[float]) -> Judged:
        generator = self._generator
        assert generator is not None
        if self.price is not None:
            return decide_at_price(q, p, ratio, generator, self.price)
        kind, delta = self.kind, self._amount
        if isinstance(kind, Renyi):
            delta = float(kind.to_alpha(torch.tensor(delta, dtype=torch.float64)))
        return decide_at_budget(q, p, ratio, generator, delta)

    @cached_property
    def _generator(self) -> FDivergence | None:
        kind = self.kind
        if isinstance(kind, Renyi):
            return kind.generator
        return kind if isinstance(kind, FDivergence) else None


def _kept(upper: Tensor, q_n: Tensor, p_n: Tensor) -> Tensor:
    """Return min(1, b q_n/p_n), 0 where q_n = 0."""
    ceiling = torch.where(q_n > 0, upper * torch.where(q_n > 0, q_n, 1.0), 0.0)
    return keep_probability(ceiling, p_n)
