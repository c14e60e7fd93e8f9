"""The optimum under a budget on the emitted law, as a policy."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence
from cactus_theory.divergences.definition import registered_divergence as find_divergence
from cactus_theory.optimum import solve
from cactus_theory.optimum.soft import PRECISIONS, PricedBand
from cactus_theory.optimum.soft_row import BudgetRow, SoftRow
from cactus_theory.policies._base import (
    Entries,
    Flat,
    FlatCoins,
    FlatIds,
    Ids,
    Rows,
    keep_probability,
)
from cactus_theory.policies._forms import FixedTarget
from cactus_theory.policies._records import (
    Budget,
    Decision,
    Declaration,
    Node,
    Path,
    Residual,
    Step,
)
from cactus_theory.policies._registry import register

# below this budget the divergence of float32 rows is mostly rounding error
LEAST_BUDGET = 1e-6
# so many rows by price are solved root by root, more of them together
FEW_ROWS = 32


@register("band")
@dataclass(frozen=True)
class Band(FixedTarget):
    r"""Verify against the best row within the budget: :math:`h = \mathrm{clip}(p, aq, bq)`.

    By ``delta`` every row may spend that much divergence; by ``price`` every row spends until
    one more unit of divergence buys less than that much acceptance, which is the best way to
    share a budget among rows. Keep n with min(1, b q_n/p_n). Source: THEORY.md,
    Theorem 7; for reverse_kl this is mentored decoding (Tran-Thien 2023).
    """

    delta: float | None = None
    price: float | None = None
    divergence: str = "kl"
    keeps_what_lossless_keeps = True

    def __post_init__(self) -> None:
        kind = find_divergence(self.divergence)
        name, amount, _ = solve.chosen_knob(kind, delta=self.delta, price=self.price)
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
        """Return (a, b) of each row, (..., 1): by Newton where it converges, else by sorting.

        Those of q and p over their sums, times Σp/Σq: rounded rows need not sum to 1. b = ∞ and
        a = 0 stand for h = p.
        """
        flat_q, flat_p = (row.double().reshape(-1, row.shape[-1]) for row in (q, p))
        shape = (*q.shape[:-1], 1)
        if self.answers_rows and len(flat_q) <= FEW_ROWS and q.device.type == "cpu":
            rows = zip(*(row.detach().numpy() for row in (flat_q, flat_p)), strict=True)
            solved = torch.tensor([self._solved(*row) for row in rows], dtype=torch.float64)
            return solved[..., :1].reshape(shape), solved[..., 1:].reshape(shape)
        unit = flat_p.sum(-1) / flat_q.sum(-1)
        lower, upper = (unit * edge for edge in self._edges_of_laws(flat_q, flat_p))
        return lower.reshape(shape), upper.reshape(shape)

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

    def decide(self, q: Flat, p: Flat, n: FlatIds, coin: FlatCoins) -> Decision:
        """Return coin < b q_n/p_n and the scale a; see :mod:`cactus_theory.optimum.soft_row`.

        Row by row without solving the band first where rows are on the CPU and the policy answers
        rows, or has float32 rows and a finite budget above rounding.
        """
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        if q.dtype not in PRECISIONS:
            q, p = q.float(), p.float()
        delta = self.delta or 0.0
        by_budget = self._smooth and q.dtype == torch.float32 and LEAST_BUDGET < delta < math.inf
        if q.device.type != "cpu" or not (self.answers_rows or by_budget):
            lower, upper = self._edges_of_laws(q, p)
            return Decision(coin < _kept(upper, q_n, p_n), Residual(scale=lower))
        ratio = torch.where(q_n > 0, coin * p_n / q_n, math.inf).tolist()
        rows = zip(q.detach().numpy(), p.detach().numpy(), ratio, strict=True)
        kept, lower = zip(*(self.decide_row(*row) for row in rows), strict=True)
        return Decision(
            torch.tensor(kept), Residual(scale=torch.tensor(lower, dtype=torch.float64))
        )

    def ratio_bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return bounds on h_n/p_n: between 1 and q_n/p_n, raised at most to the largest b."""
        ratio, most = (q_n / p_n).nan_to_num(nan=0.0), self.highest
        raised = (ratio > 0).double() if most == math.inf else (most * ratio).clamp(max=1.0)
        return ratio.clamp(max=1.0), torch.maximum(raised, ratio)

    @cached_property
    def highest(self) -> float:  # type: ignore[override]
        """Return the largest b, as a ≤ 1."""
        generator = self.kind.generator
        if self.price and generator is self.kind and self._smooth:
            assert generator is not None
            return generator.upper_edge(1.0, 1 / self.price)
        return math.inf

    def follow(self, q: Flat, p: Flat, n: FlatIds, path: Path) -> Step:
        """Return P h_n/p_n and the scale P a."""
        q_n, p_n = (row.gather(-1, n[:, None])[:, 0].double() for row in (q, p))
        if q.dtype not in PRECISIONS:
            q, p = q.float(), p.float()
        lower, upper = self._edges_of_laws(q, p)
        ceiling = torch.where(q_n > 0, upper * torch.where(q_n > 0, q_n, 1.0), 0.0)
        h_n = torch.minimum(torch.maximum(p_n, lower * q_n), ceiling)
        return Step(path.alive * (h_n / p_n), Residual(scale=path.alive * lower))

    @cached_property
    def answers_rows(self) -> bool:  # type: ignore[override]
        """Return whether it is priced, by the price of a smooth generator."""
        priced = self.price is not None and 0 < self.price < math.inf
        return priced and self._smooth and self.kind.generator is self.kind

    def row(self, q: np.ndarray, p: np.ndarray) -> SoftRow | BudgetRow:
        """Return what finds the band of one row, (V,) on the CPU, or decides without it."""
        shared = self._shared
        if isinstance(shared, PricedBand):
            return SoftRow(q, p, 1.0, shared)
        return BudgetRow(q, p, *shared)

    def decide_row(self, q: np.ndarray, p: np.ndarray, ratio: float) -> tuple[bool, float]:
        """Return whether ``ratio`` < b, and a if not."""
        row = self.row(q, p)
        return row.passes(ratio), row.scale

    def follow_row(self, node: Node) -> tuple[float, float | None, float | None]:
        """Return P h_n/p_n, and P a and P h/q of certain tokens.

        These are solved where h_n ≠ p_n, or the path may end.
        """
        alive, ratio = node.alive, node.draft_ratio
        row = SoftRow(node.q, node.p, 1.0, self._shared, certain=node.certain)
        cut = ratio >= row.cap or (node.joint and alive < 1)
        if row.passes(math.inf if node.ends or cut else ratio):  # ratio < b
            if alive == 1 or not row.recovers(ratio):
                return alive, None, None
        return alive * row.ratio_of(ratio, node.joint), alive * row.scale, alive * row.raised

    def _edges_of_laws(self, q: Flat, p: Flat) -> tuple[Tensor, Tensor]:
        """Return (a, b), (R,), of rows divided by their sums, all of them together."""
        q, p = check.normalised(q), check.normalised(p)
        lower, upper = solve.edges(q, p, self.kind, delta=self.delta, price=self.price)
        return lower[:, 0], upper[:, 0]

    def _solved(self, q: np.ndarray, p: np.ndarray) -> tuple[float, float]:
        """Return (a, b) of one row at a price."""
        row = SoftRow(q, p, 1.0, self._shared, exact=True)
        row.passes(math.inf)
        return row.scale, row.upper

    @cached_property
    def _shared(self) -> Any:
        """Return what all bands share: what a price says, or a generator and its budget."""
        generator = self.kind.generator
        assert generator is not None
        if self.price is not None:
            return PricedBand(generator, self.price)
        delta = torch.tensor(self.delta, dtype=torch.float64)
        return generator, float(self.kind.to_generator(delta))

    @property
    def _smooth(self) -> bool:
        generator = self.kind.generator
        return generator is not None and generator.smooth


def _kept(upper: Tensor, q_n: Tensor, p_n: Tensor) -> Tensor:
    """Return min(1, b q_n/p_n), 0 where q_n = 0."""
    ceiling = torch.where(q_n > 0, upper * torch.where(q_n > 0, q_n, 1.0), 0.0)
    return keep_probability(ceiling, p_n)
