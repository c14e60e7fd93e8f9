r"""The bands of rows within a budget or at a price, by compiled loops for each row or in torch.

A band is h = clip(p, max(a, c) q, min(b, C) q). The edges a and b follow from the price or budget;
c and C are boxes, bounds on h/q of single tokens (THEORY.md, Theorems 7, 13, 24 and 25). At a node
that block verification reaches with probability P, p/P takes the place of p. ``charge_of`` measures
the divergence and the acceptance of a row. The policy ``band`` and nodes of drafted
paths use this module.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.chunks import parts_of
from cactus_theory.base.tensors import as_list, normalised
from cactus_theory.base.tolerances import DECIDED, LEAST
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences.classical import KL
from cactus_theory.optimum.band_row import (
    COSTS,
    BudgetRow,
    NodeRow,
    PricedBand,
    PricedRow,
    Row,
    costs_of,
    is_compiled,
    loops,
)
from cactus_theory.optimum.batch_edges import chosen_knob, edges
from cactus_theory.optimum.boxes import FREE, NO_BOXES, Boxes, cut_to_boxes
from cactus_theory.optimum.sorted_path import PerRow, Rows

# error of a law's sum up to which the law is not divided by the sum
ROUNDING = 1e-12
Batch = Float[Tensor, "*batch vocab"]

# least budget δ of rows that are solved one by one: D of smaller budgets is mostly rounding
LEAST_BUDGET = 1e-6


# least share of the largest target probability that a token of the head has
HEAD = 0.2
# no row h, and the band that stands in compiled loops for a row h that is given
EMPTY, NO_BAND = np.empty(0), (0.0, 1.0, 1.0, FREE)


@dataclass(frozen=True)
class Bands:
    """The bands of rows within a budget ``delta`` of a divergence, or at a price, with boxes."""

    kind: Divergence
    delta: float | None = None
    price: float | None = None
    boxes: Boxes = NO_BOXES

    @cached_property
    def priced(self) -> PricedBand | None:
        """Return constants of the bands at a positive, finite price of an f-divergence, or None."""
        if self.price is None or not 0 < self.price < math.inf:
            return None
        return PricedBand(self.kind, self.price) if isinstance(self.kind, FDivergence) else None

    @cached_property
    def _by_row(self) -> bool:
        """Return whether bands of rows on a CPU are solved one by one in compiled loops."""
        if (f := self.kind.generator) is None or not is_compiled(f):
            return False
        solves_budget = LEAST_BUDGET < (self.delta or 0.0) < math.inf and not self.boxes
        return solves_budget or self.priced is not None

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> PricedRow | BudgetRow | None:
        """Return the band of one row on a CPU, or None if :meth:`laws` has to solve it.

        ``alive`` is P. Within a budget it is not used: the band is that of p.
        """
        if not self._by_row:
            return None
        if self.priced is not None:
            return PricedRow(q, p, self.priced, alive, self.boxes)
        f = self.kind.generator
        assert f is not None and self.delta is not None
        delta = torch.tensor(self.delta, dtype=torch.float64, device="cpu")
        return BudgetRow(q, p, f, float(self.kind.to_generator(delta)))

    @torch.no_grad()
    def laws(self, q: Batch, p: Batch, alive: Float[Tensor, "*batch"] | None = None) -> Batch:
        """Return the rows h (..., V), float64 with sum 1; h = 0 where q = 0.

        ``alive`` (...) has the P of each row. P = 0, a node that is never reached, counts as 1.
        """
        flat_q, flat_p = (rows.reshape(-1, rows.shape[-1]).double() for rows in (q, p))
        ratios = torch.ones_like(flat_q[:, 0]) if alive is None else alive.reshape(-1).double()
        ratios = torch.where(ratios > 0, ratios, 1.0)
        h = torch.empty(flat_q.shape, dtype=torch.float64, device=q.device)
        if q.device.type == "cpu" and self._by_row:
            rows = zip(h.numpy(), flat_q.numpy(), flat_p.numpy(), as_list(ratios), strict=True)
            for out, row_q, row_p, ratio in rows:
                row = self.row(row_q, row_p, ratio)
                assert row is not None
                row.write(row_q, row_p, out)
        else:
            for at in parts_of(h):
                self._write_together(flat_q[at], flat_p[at], ratios[at], h[at])
        total = h.sum(-1, keepdim=True)  # not divided by if nearly 1, so that h = p inside a band
        return h.div_(torch.where((total - 1).abs() <= ROUNDING, 1.0, total)).reshape(q.shape)

    def _write_together(self, q: Rows, p: Rows, alive: PerRow, out: Rows) -> None:
        """Write the rows clip(p/P, max(a, c) q, min(b, C) q)."""
        q, p = normalised(q), normalised(p)
        # denormal tokens keep their q, as p/q may overflow; NaN stays NaN
        all_q, q = q, torch.where(q < LEAST, 0.0, q)
        cut, lacking = cut_to_boxes(q, p, alive, *self.boxes.of_rows(q))
        knob, amount, _ = chosen_knob(self.kind, delta=self.delta, price=self.price)
        lower, upper = edges(q, cut, self.kind, knob, amount, lacking)
        top = torch.where(q > 0, upper * q, 0.0)  # 0 also for an infinite edge, where ∞·0 is NaN
        torch.maximum(torch.minimum(cut, top), torch.where(q > 0, lower * q, all_q), out=out)


class Charge(NamedTuple):
    """The charge of rows h: D(h‖q), the acceptance, and Σ (h − q)₊ over unlikely tokens.

    The acceptance is Σ min(p/P, h), or Σ p φ if the policy's φ need not reach this sum. Unlikely
    tokens are those with q below a fixed share, HEAD, of max q.
    """

    spent: Any
    accepted: Any
    raised: Any


def charge_of(f: FDivergence, q: Row, p: Row, alive: float, law: NodeRow | Row) -> Charge:
    """Return the charge of ``law``, a solved :class:`NodeRow` or a row h in float64, at a node.

    ``alive`` is the node's P. :class:`Charge` describes the three numbers.
    """
    q, p = np.ascontiguousarray(q), np.ascontiguousarray(p)
    compiled, head = loops(), HEAD * float(q.max())
    solved = isinstance(law, NodeRow)
    band, h = (law.band, EMPTY) if solved else (NO_BAND, np.ascontiguousarray(law))
    if type(f) in COSTS:
        spent, accepted, raised, outside = compiled.whole_charge(
            q, p, band, h, type(f) is KL, alive, head
        )
    else:
        mass, drafted = compiled.sums_of(q, p)
        drafted, ratios = drafted * alive, np.empty(q.size)
        # Σ h and Σ min(p/P, h) where h/q is not finite; a solved row has no mass there
        outside, overlap = 0.0, 0.0
        if solved:
            compiled.write_ratios(q, p, band, 0, ratios)
        else:
            outside, overlap = compiled.write_quotients(q, p, h, mass, drafted, ratios)
        costs = costs_of(f, ratios)
        spent, accepted, raised = compiled.charges_of(q, p, ratios, costs, mass, drafted, head)
        accepted += overlap
    if outside:  # 0 · ∞ would be NaN
        spent += outside * (f.slope_at_infinity - f.slope_at_one)
    return Charge(max(spent, 0.0), accepted, raised + outside)


def divergences_of(kind: Divergence, h: Tensor, q: Tensor) -> Tensor:
    """Return D(h‖q) of rows (..., V) that sum to 1, float64 (...); on a CPU row by row."""
    f = kind.generator
    if f is None or q.is_cuda or not q.numel() or q.dtype not in DECIDED or loops() is None:
        return kind.value(h.double(), q.double())
    pairs = zip(*(rows.reshape(-1, rows.shape[-1]).numpy() for rows in (q, h)), strict=True)
    # the draft's row only counts for the acceptance, which is not read: h stands for it
    spent = [charge_of(f, row_q, p=row_h, alive=1.0, law=row_h).spent for row_q, row_h in pairs]
    return kind.from_generator(q.new_tensor(spent, dtype=torch.float64)).reshape(q.shape[:-1])
