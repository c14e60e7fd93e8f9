r"""The bands of rows under one knob: one by one in compiled loops, or together in torch.

Each is h = clip(p, max(a, c) q, min(b, C) q), with a and b from a price or a budget (THEORY.md,
Theorems 7, 13, 24 and 25); at a node that is reached with P it is that of p/P.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.arguments import AT_ONCE, normalised
from cactus_theory.base.tolerances import LEAST
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.optimum.boxes import NO_BOXES, Boxes
from cactus_theory.optimum.edges import edges
from cactus_theory.optimum.rows import BudgetRow, PricedBand, PricedRow, is_compiled
from cactus_theory.optimum.sorted_path import PerRow, Rows

# error of a sum of a law that is left as it is
ROUNDING = 1e-12
Batch = Float[Tensor, "*batch vocab"]

# least budget δ of rows that are solved one by one: below it their divergence is mostly rounding
LEAST_BUDGET = 1e-6


@dataclass(frozen=True)
class Bands:
    """The bands within a budget ``delta`` of a divergence, or at a price, with the same boxes."""

    kind: Divergence
    delta: float | None = None
    price: float | None = None
    boxes: Boxes = NO_BOXES

    @cached_property
    def priced(self) -> PricedBand | None:
        """Return the constants of all rows' bands at the price of an f-divergence, else None."""
        if self.price is None or not 0 < self.price < math.inf:
            return None
        return PricedBand(self.kind, self.price) if isinstance(self.kind, FDivergence) else None

    @cached_property
    def highest(self) -> float:
        """Return a bound on h/q; of the band of p/P, on that over P."""
        if self.priced is not None:
            return self.priced.high
        return 1.0 if self.price == math.inf else math.inf

    @cached_property
    def _by_row(self) -> bool:
        """Return whether bands of rows on a CPU are solved one by one."""
        if (f := self.kind.generator) is None or not is_compiled(f):
            return False
        within = LEAST_BUDGET < (self.delta or 0.0) < math.inf and not self.boxes
        return within or self.priced is not None

    def row(self, q: np.ndarray, p: np.ndarray, alive: float = 1.0) -> PricedRow | BudgetRow | None:
        """Return the band of one row on a CPU, None where it is solved with others.

        Within a budget it is that of p by itself.
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
        """Return the rows h (..., V), float64 of sum 1; nothing where q = 0.

        ``alive`` (...) is P by row; P = 0, which no node is reached with, is taken for P = 1.
        """
        flat_q, flat_p = (rows.reshape(-1, rows.shape[-1]).double() for rows in (q, p))
        ratios = torch.ones_like(flat_q[:, 0]) if alive is None else alive.reshape(-1).double()
        ratios = torch.where(ratios > 0, ratios, 1.0)
        h = torch.empty(flat_q.shape, dtype=torch.float64, device=q.device)
        if q.device.type == "cpu" and self._by_row:
            rows = zip(h.numpy(), flat_q.numpy(), flat_p.numpy(), ratios.tolist(), strict=True)
            for out, own_q, own_p, ratio in rows:
                row = self.row(own_q, own_p, ratio)
                assert row is not None
                row.write(own_q, own_p, out)
        else:
            size = max(1, AT_ONCE // q.shape[-1])
            parts = (rows.split(size) for rows in (flat_q, flat_p, ratios, h))
            for own_q, own_p, ratio, out in zip(*parts, strict=True):
                self._write_together(own_q, own_p, ratio, out)
        total = h.sum(-1, keepdim=True)  # what is p inside a band stays p
        return h.div_(torch.where((total - 1).abs() <= ROUNDING, 1.0, total)).reshape(q.shape)

    def _write_together(self, q: Rows, p: Rows, alive: PerRow, out: Rows) -> None:
        """Write the rows clip(p/P, max(a, c) q, min(b, C) q)."""
        q, p = normalised(q), normalised(p)
        q = torch.where(q < LEAST, 0.0, q)  # NaN stays; such tokens may not rise
        floor, ceiling = self.boxes.of_rows(q)
        knobs: Any = {"delta": self.delta, "price": self.price}
        lower, upper = edges(q, p, self.kind, **knobs, ceiling=ceiling, alive=alive, floor=floor)
        lower = lower if floor is None else torch.maximum(lower, floor)
        upper = upper if ceiling is None else torch.minimum(upper, ceiling)
        top = torch.where(q > 0, upper * torch.where(q > 0, q, 1.0), 0.0)
        torch.maximum(torch.minimum(p / alive[:, None], top), lower * q, out=out)
