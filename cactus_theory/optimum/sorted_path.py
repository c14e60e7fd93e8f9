r"""All optimal bands h_ε = clip(p, a q, b q) of a row, from p to q, from one sort by p/q.

ε is the rejection probability. Of all rows with this ε, h_ε has the least divergence, for every f
(THEORY.md, Theorem 7). These bands, in the order of ε, are called the row's path.

The edges solve Σ(p − bq)₊ = ε and Σ(aq − p)₊ = ε, two monotone, piecewise linear equations. Sums
have no negative terms and run from both ends inwards (tails) or from the ratio 1 outwards
(divergence), so that entries of 1e-30 next to entries of 0.1 keep their precision. After the sort
each evaluation is a lookup, O(log V). The edge search (:mod:`cactus_theory.optimum.batch_edges`)
uses this path where Newton's method does not converge.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.divergences import FDivergence

Rows = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, "rows"]
Flags = Bool[Tensor, "rows"]
Places = Int[Tensor, "rows"]


@dataclass(frozen=True)
class Edges:
    """The edges a ≤ b of the bands of R rows, and flags of the rows.

    ``lower`` and ``upper`` are a and b. ``leaked`` is the mass that h has where q = 0.
    ``lossless``: h = q. ``slack``: the limit does not bind, so the band has the smallest possible
    ε. ``whole``: the band has the smallest ε, and h = p.
    """

    lower: PerRow
    upper: PerRow
    leaked: PerRow
    lossless: Flags
    slack: Flags
    whole: Flags

    def of_rows(self, at: slice) -> "Edges":
        """Return the edges of the rows ``at``."""
        return Edges(*(getattr(self, field.name)[at] for field in fields(self)))


class Path:
    """Tables from which :meth:`at` looks up the bands of float64 rows (R, V), sorted by p/q.

    ``zero_mass`` is P₀: the draft's mass on tokens with q = 0 (or so small that p/q overflows),
    plus 1 minus the sum of p. Bands have ε from ``smallest`` to ``largest`` = Σ(q − p)₊, where
    h = q.
    """

    def __init__(
        self, q: Rows, p: Rows, f: FDivergence, free_support: bool, zero_mass: PerRow
    ) -> None:
        ratio = p / q
        inside = torch.isfinite(ratio)
        q_in, p_in = torch.where(inside, q, 0.0), torch.where(inside, p, 0.0)
        self.generator, self.free_support, self.zero_mass = f, free_support, zero_mass
        self.ratio, order = torch.where(inside, ratio, 1.0).sort(-1)
        q_sorted, p_sorted = q_in.gather(-1, order), p_in.gather(-1, order)
        zero = torch.zeros_like(self.zero_mass)[:, None]
        # the masses of the first i tokens, and of the tokens from i on
        self.q_below = torch.cat([zero, q_sorted.cumsum(-1)], -1)
        self.p_below = torch.cat([zero, p_sorted.cumsum(-1)], -1)
        self.q_above = torch.cat([_tail_sums(q_sorted), zero], -1)
        self.p_above = torch.cat([_tail_sums(p_sorted), zero], -1)
        gap = self.ratio.diff(dim=-1)
        # Σ(aq − p)₊ at a = ratio i
        self.fill = torch.cat([zero, (gap * self.q_below[:, 1:-1]).cumsum(-1)], -1)
        # Σ(p − bq)₊ at the ratios b, from the largest ratio down, so that the table rises
        self.excess = torch.cat([zero, (gap * self.q_above[:, 1:-1]).flip(-1).cumsum(-1)], -1)
        terms = torch.where(q_sorted > 0, q_sorted * f.centred(self.ratio), 0.0)
        # q f(p/q) over the first i tokens with ratios above 1, and over those below 1 from i on
        over = self.ratio > 1
        self.cost_over = torch.cat([zero, torch.where(over, terms, 0.0).cumsum(-1)], -1)
        self.cost_under = torch.cat([_tail_sums(torch.where(over, 0.0, terms)), zero], -1)
        self.largest = (q - p).clamp(min=0.0).sum(-1)
        self.smallest = zero[:, 0] if free_support else zero_mass.clamp(min=0.0)

    def at(self, rejection: PerRow) -> tuple[PerRow, PerRow, PerRow]:
        """Return a, b and the divergence of the bands with rejection probability ε.

        ε lies between ``smallest`` and ``largest``. b is ∞ if h has mass on tokens with q = 0.
        """
        # ``capped`` is Σ(p − bq)₊ over q > 0: what ε exceeds P₀ by
        f, capped = self.generator, (rejection - self.zero_mass).clamp(min=0.0)
        low = _search(self.fill, rejection)  # number of tokens that are lifted to aq
        high = self.excess.shape[-1] - _search(self.excess, capped)  # first token cut to bq
        q_low, q_high = _pick(self.q_below, low), _pick(self.q_above, high)
        lower = self._edge(_pick(self.p_below, low) + rejection, q_low, low).clamp(max=1.0)
        upper = self._edge(_pick(self.p_above, high) - capped, q_high, high).clamp(min=1.0)
        cost = _pick(self.cost_over, high) + _pick(self.cost_under, low)
        cost = cost + _weighted(q_low, f.centred(lower)) + _weighted(q_high, f.centred(upper))
        if self.free_support:
            leaked = (self.zero_mass - rejection).clamp(min=0.0)
            cost = cost + leaked * (f.slope_at_infinity - f.slope_at_one)
            upper = torch.where(leaked > 0, torch.inf, upper)
        return lower, upper, cost

    def _edge(self, mass: PerRow, q_mass: PerRow, index: Places) -> PerRow:
        """Return mass/q_mass, or 1 if q_mass is 0, clamped to the ratios p/q beside ``index``.

        Next to tokens with q = 1e-25 the quotient alone is rounding error.
        """
        edge = torch.where(q_mass > 0, mass / q_mass, 1.0)
        last = self.ratio.shape[-1] - 1
        below = _pick(self.ratio, (index - 1).clamp(min=0))
        edge = torch.where(index > 0, torch.maximum(edge, below), edge)
        above = _pick(self.ratio, index.clamp(max=last))
        return torch.where(index <= last, torch.minimum(edge, above), edge)


def _tail_sums(values: Tensor) -> Tensor:
    """Return the sums from each position to the end, added up from the end."""
    return values.flip(-1).cumsum(-1).flip(-1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(-1, index[:, None])[:, 0]


def _search(rising: Tensor, value: Tensor) -> Tensor:
    return torch.searchsorted(rising, value[:, None].contiguous())[:, 0]


def _weighted(mass: Tensor, cost: Tensor) -> Tensor:
    """Return mass·cost, 0 where the mass is 0 (even for a cost of ∞: an empty set costs 0)."""
    return torch.where(mass > 0, mass * torch.where(mass > 0, cost, 0.0), 0.0)
