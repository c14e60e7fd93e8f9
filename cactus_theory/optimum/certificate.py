r"""Measure bands: the divergence spent, the price, and a proof that no row accepts more.

The proof is the Lagrange dual, which bounds the acceptance A of every row within a budget δ:
:math:`A \le λδ + μ + Σ_i q_i[\min(ρ_i, u_i) − λ f(u_i) − μ u_i]` with ρ = p/q,
u = clip(ρ, a, b), λ = 1/(f′(b) − f′(a)), μ = −λ f′(a). If the budget bounds h/q by a number c
instead, :math:`A \le Σ \min(p, cq)`. Both bounds hold at any edges a and b (THEORY.md, Theorem 8),
so a wrong solution has a gap to its bound.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base.chunks import parts_of
from cactus_theory.base.roots import convex_root
from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences.classical import TotalVariation
from cactus_theory.divergences.definition import SAFE_RATIO
from cactus_theory.optimum.sorted_path import Edges, Path, PerRow, Rows


@dataclass(frozen=True)
class Measured:
    """Bands as rows (R, V), with acceptance, divergence, price and gap to the dual bound, (R,)."""

    rows: Rows
    edges: Edges
    acceptance: PerRow
    divergence: PerRow
    price: PerRow
    gap: PerRow


@dataclass(eq=False)
class Geometry:
    """A divergence on float64 rows (R, V): measures the bands of these rows, and proves bounds.

    Budgets are translated to budgets of ``generator``, an f-divergence. ``free`` allows mass on
    tokens with q = 0. Rows p may have another sum than 1; ``lacking`` is then 1 minus the sum.
    """

    q: Rows
    p: Rows
    divergence: Divergence
    generator: FDivergence
    free: bool = False
    lacking: PerRow | None = None

    def of_rows(self, at: Tensor | slice) -> "Geometry":
        """Return the geometry of the rows at the indices ``at``."""
        if isinstance(at, slice) and at.stop - at.start == len(self.q):
            return self
        lacking = None if self.lacking is None else self.lacking[at]
        return replace(self, q=self.q[at], p=self.p[at], lacking=lacking)

    @cached_property
    def inside(self) -> Bool[Tensor, "rows vocab"] | None:
        """Return where p/q is finite, (R, V); None if p/q is finite everywhere."""
        if not self.q.numel() or float(self.q.amin()) > SAFE_RATIO:
            return None
        return torch.isfinite(self.p / self.q)

    @cached_property
    def zero_mass(self) -> PerRow:
        """Return P₀ = 1 − Σ_{q>0} p of each row: the draft's mass where the target has none."""
        lacking = torch.zeros_like(self.q[:, 0]) if self.lacking is None else self.lacking
        if self.inside is None:
            return lacking
        return lacking + torch.where(self.inside, 0.0, self.p).sum(-1)

    @cached_property
    def path(self) -> Path:
        """Return tables of the bands of these rows at all rejection probabilities."""
        return Path(self.q, self.p, self.generator, self.free, self.zero_mass)

    @property
    def reachable(self) -> PerRow:
        """Return the largest acceptance that a band of each row reaches, (R,)."""
        return torch.ones_like(self.zero_mass) if self.free else 1 - self.zero_mass

    def measured(self, edges: Edges) -> Measured:
        """Return the bands with these edges, written out and measured a few rows at a time."""
        rows = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        # no rows are one empty part, so that there are columns to join
        slices = list(parts_of(rows)) or [slice(0, 0)]
        parts = (self.of_rows(at)._measured(edges.of_rows(at), rows[at]) for at in slices)
        return Measured(rows, edges, *map(torch.cat, zip(*parts, strict=True)))

    def _measured(self, edges: Edges, rows: Rows) -> tuple[PerRow, PerRow, PerRow, PerRow]:
        """Write the bands to ``rows``; return acceptance, divergence, price and gap."""
        self.write_rows(edges, rows)
        accepted = torch.minimum(self.p, rows).sum(-1)
        generated, spent = self.measure(rows)
        bound = self.bound(edges, generated, 1 / self.slope(edges.lower, edges.upper))
        # no row accepts more than the path's end: a tighter bound where f′(a) leaves float64
        gap = torch.where(bound < self.reachable, bound, self.reachable) - accepted
        return (
            accepted,
            torch.where(edges.lossless, 0.0, spent),
            torch.where(edges.slack, 0.0, self.price(edges, spent)),
            torch.where(edges.lossless | edges.slack, 0.0, gap),
        )

    def write_rows(self, edges: Edges, rows: Rows) -> None:
        """Write h = clip(p, aq, bq), with mass ``edges.leaked``, divided as in p, where q = 0."""
        q, p = self.q, self.p
        torch.maximum(p, q * edges.lower[:, None], out=rows)
        torch.minimum(rows, q * edges.upper[:, None], out=rows)
        if self.inside is not None:
            share = edges.leaked / torch.where(self.zero_mass > 0, self.zero_mass, 1.0)
            # where p/q overflows, h = q: 0 there would cost ∞ if f(0) is ∞
            rows.copy_(torch.where(self.inside, rows, q + p * share[:, None]))
        if math.isinf(self.generator.at_zero):
            # a is above 0 here, but a·q may be below every float64, and h = 0 would cost ∞
            torch.maximum(rows, q.clamp(max=torch.finfo(q.dtype).tiny), out=rows)
        for at_end, end in ((edges.lossless, q), (edges.whole, p)):
            if bool(at_end.any()):
                rows[at_end] = end[at_end]

    def measure(self, rows: Rows) -> tuple[PerRow, PerRow]:
        """Return the f-divergence of rows h from q with the generator f, and D(h‖q)."""
        if self.inside is None and len(rows):
            cost = _row_products(self.q, self.generator.centred(rows / self.q))
            generated = cost.clamp_(min=0.0)  # a rounded sum may be negative
        else:
            generated = self.generator.value(rows, self.q)
        return generated, self.divergence.from_generator(generated)

    def spent(self, upper: PerRow, generated: PerRow) -> PerRow:
        """Return D(h‖q) of bands, given ``generated``, their f-divergence with the generator f."""
        return self.divergence.from_generator(generated)

    def slope(self, lower: PerRow, upper: PerRow) -> PerRow:
        """Return f′(b) − f′(a) = 1/λ, where f′(b) at b = ∞ is ``slope_at_infinity``."""
        f = self.generator
        far = torch.full_like(upper, f.slope_at_infinity - f.slope_at_one)
        above = torch.where(torch.isinf(upper), far, f.centred_slope(upper))
        return above - f.centred_slope(lower)

    def price(self, edges: Edges, spent: PerRow) -> PerRow:
        """Return the price dA/dδ of each band.

        At h = q the price is the limit for δ → 0, or 0 if the acceptance cannot rise.
        """
        f, kind = self.generator, self.divergence
        price = kind.price_from_generator(1 / self.slope(edges.lower, edges.upper), spent)
        if not bool(edges.lossless.any()):
            return price
        above = self.p > self.q
        can_rise = (above if self.inside is None else above & self.inside).any(-1)
        # mass for tokens with q = 0 comes from tokens that fall below q: the slope of f below 1
        leak = 1 / (f.slope_at_infinity - f.slope_at_one + f.kink / 2)
        zero = torch.zeros_like(spent)
        price_of_leak = kind.price_from_generator(torch.full_like(zero, leak), zero)
        only_leak = torch.where((self.zero_mass > 0) & self.free, price_of_leak, zero)
        first = torch.where(can_rise, 1 / f.kink if f.kink else math.inf, only_leak)
        return torch.where(edges.lossless, first, price)

    def rejection(self, delta: PerRow) -> PerRow:
        """Return the rejection probability ε of the bands that spend the budgets ``delta``."""
        path, budget = self.path, self.divergence.to_generator(delta)

        def evaluate(rejection: Tensor) -> tuple[Tensor, Tensor]:
            lower, upper, spent = path.at(rejection)
            return spent, -self.slope(lower, upper)  # dD/dε = f′(a) − f′(b)

        return convex_root(evaluate, path.smallest, path.largest, budget)

    def bound(self, edges: Edges, generated: PerRow, price: float | PerRow) -> PerRow:
        """Return the dual bound at λ = ``price``, (R,): no row of equal divergence accepts more.

        ``generated`` is δ of the module's formula, measured as the f-divergence of ``generator``:
        for example the f-divergence of the bands. For the bands with these edges λ is
        1/(f′(b) − f′(a)).
        """
        q, p, f = self.q, self.p, self.generator
        level = -price * f.centred_slope(edges.lower)
        u = p / q
        if self.inside is not None:
            u[~self.inside] = 1.0  # q u and q f(u) are then 0 there, or nearly 0
        torch.minimum(torch.maximum(u, edges.lower[:, None], out=u), edges.upper[:, None], out=u)
        accepted = torch.minimum(p, q * u).sum(-1)
        costs = price * _row_products(q, f.centred(u)) + level * _row_products(q, u)
        return price * generated + level + accepted - costs


def _row_products(one: Rows, other: Rows) -> PerRow:
    """Return the scalar product of each row of ``one`` with the same row of ``other``, (R,)."""
    return torch.bmm(one[:, None], other[..., None])[:, 0, 0]


class CeilingGeometry(Geometry):
    """A divergence whose budget bounds h/q at every token; the same bands are optimal."""

    def measure(self, rows: Rows) -> tuple[PerRow, PerRow]:
        """Return D(h‖q) twice, as there is no generator."""
        spent = self.divergence.value(rows, self.q)
        return spent, spent

    def spent(self, upper: PerRow, generated: PerRow) -> PerRow:
        """Return the divergence whose ceiling is b: ln b for the max-divergence."""
        return self.divergence.from_ceiling(upper)

    def price(self, edges: Edges, spent: PerRow) -> PerRow:
        """Return dA/dδ = c′(δ) Σ_{p>bq} q, with c(δ) = b the largest h/q that the budget allows."""
        mass_above = torch.where(self.p > edges.upper[:, None] * self.q, self.q, 0.0).sum(-1)
        return self.divergence.ceiling_slope(edges.upper) * mass_above

    def rejection(self, delta: PerRow) -> PerRow:
        """Return the rejection probability Σ (p − c q)₊ plus ``lacking``, c the ceiling on h/q.

        The result is cut off at the least and the largest rejection probability of bands.
        """
        over = (self.p - self.divergence.ceiling(delta)[:, None] * self.q).clamp(min=0.0).sum(-1)
        over = over if self.lacking is None else over + self.lacking
        return torch.minimum(torch.maximum(over, self.path.smallest), self.path.largest)

    def bound(self, edges: Edges, generated: PerRow, price: float | PerRow) -> PerRow:
        """Return the bound Σ min(p, bq) on the acceptance."""
        return torch.minimum(self.p, edges.upper[:, None] * self.q).sum(-1)


def geometry_of(
    q: Rows,
    p: Rows,
    divergence: Divergence,
    support: str = "target",
    lacking: PerRow | None = None,
) -> Geometry:
    """Return the geometry of a divergence on float64 rows (R, V); rows q sum to 1."""
    generator = divergence.generator
    if generator is None:
        # any generator will do for a ceiling: the bands of a path do not depend on it, its costs
        # are not read, and no budget allows mass where q = 0
        return CeilingGeometry(q, p, divergence, TotalVariation(), lacking=lacking)
    free = support == "free" and math.isfinite(generator.slope_at_infinity)
    return Geometry(q, p, divergence, generator, free, lacking)
