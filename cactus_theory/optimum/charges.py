"""The cost of a law at a row, and how much it accepts, measured by compiled loops part by part."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.tolerances import DECIDED
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.optimum.rows import PART, NodeRow, Row, costs_of, loops

# least share of the largest target probability that a token of the head has
HEAD = 0.2


class Charge(NamedTuple):
    """D(h‖q) of a row h, its acceptance Σ min(p/P, h), and the mass it raises off the head."""

    spent: float
    accepted: float
    raised: float


def charge_of(f: FDivergence, q: Row, p: Row, alive: float, law: NodeRow | Row) -> Charge:
    """Return the charge of a law at a node: a solved row, or h, float64.

    The head are tokens with q ≥ HEAD · max q. No temporary is longer than PART.
    """
    q, p = np.ascontiguousarray(q), np.ascontiguousarray(p)
    compiled, head = loops(), HEAD * float(q.max())
    mass, drafted = compiled.sums_of(q, p)
    ratios = np.empty(min(PART, q.size))
    total, beyond = np.zeros(3), np.zeros(2)
    for start in range(0, q.size, PART):
        at = slice(start, start + PART)
        own_q, own_p = q[at], p[at]
        ratio = ratios[: own_q.size]
        if isinstance(law, NodeRow):
            compiled.write_ratios(own_q, own_p, law.band, start, ratio)
        else:
            row = own_q, own_p, law[at], mass, drafted * alive, ratio
            beyond += compiled.write_quotients(*row)
        cost = costs_of(f, ratio)
        total += compiled.charges_of(own_q, own_p, ratio, cost, mass, drafted * alive, head / mass)
    (spent, accepted, raised), (outside, overlap) = total.tolist(), beyond.tolist()
    if outside:
        spent += outside * (f.slope_at_infinity - f.slope_at_one)
    return Charge(max(spent, 0.0), accepted + overlap, raised + outside)


def divergences_of(kind: Divergence, h: Tensor, q: Tensor) -> Tensor:
    """Return D(h‖q) of rows (..., V) that sum to 1, float64 (...), on a CPU row by row."""
    f = kind.generator
    if f is None or q.is_cuda or not q.numel() or q.dtype not in DECIDED or loops() is None:
        return kind.value(h.double(), q.double())
    pairs = zip(*(rows.reshape(-1, rows.shape[-1]).numpy() for rows in (q, h)), strict=True)
    spent = [charge_of(f, own_q, own_h, 1.0, own_h).spent for own_q, own_h in pairs]
    return kind.from_generator(q.new_tensor(spent, dtype=torch.float64)).reshape(q.shape[:-1])
