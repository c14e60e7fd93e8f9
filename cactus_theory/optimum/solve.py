"""Find the bands for a budget, a price or an acceptance, and measure what they reach."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.optimum.geometry import Edges, Flags, Geometry, PerRow, Rows, geometry_of
from cactus_theory.optimum.newton import newton_edges, parts_of
from cactus_theory.optimum.path import Point
from cactus_theory.optimum.roots import halved

# slack when asking for exactly the acceptance that a row can reach
ACCEPTANCE_SLACK = 1e-12


@dataclass(frozen=True)
class Measured:
    """Bands as rows (R, V), with what they accept, spend, cost and prove, each (R,)."""

    rows: Rows
    edges: Edges
    acceptance: PerRow
    divergence: PerRow
    price: PerRow
    gap: PerRow


@dataclass(frozen=True)
class Band:
    """The solved bands of some rows."""

    geometry: Geometry
    edges: Edges

    def rows(self) -> Rows:
        """Return h = clip(p, aq, bq); zero tokens of q get nothing, or their leak when free."""
        rows = torch.empty_like(self.geometry.q, memory_format=torch.contiguous_format)
        for at in parts_of(rows):
            self.part(at)._write_rows(rows[at])
        return rows

    def measured(self) -> Measured:
        """Return the rows and what is measured on them, a few rows at a time."""
        rows = torch.empty_like(self.geometry.q, memory_format=torch.contiguous_format)
        parts = []
        for at in parts_of(rows):
            part = self.part(at)
            part._write_rows(rows[at])
            parts.append(part._measure(rows[at]))
        if not parts:
            parts = [self._measure(rows)]
        acceptance, divergence, price, gap = (torch.cat(each) for each in zip(*parts, strict=True))
        return Measured(rows, self.edges, acceptance, divergence, price, gap)

    def part(self, at: Any) -> "Band":
        """Return the bands of some of the rows."""
        if isinstance(at, slice) and at.stop - at.start == len(self.geometry.q):
            return self
        return Band(self.geometry.of_rows(at), self.edges.of_rows(at))

    def _write_rows(self, rows: Rows) -> None:
        q, p, edges = self.geometry.q, self.geometry.p, self.edges
        bound = scratch("solve.bound", q.shape, q.dtype, q.device)
        torch.maximum(p, torch.mul(q, edges.lower[:, None], out=bound), out=rows)
        torch.minimum(rows, torch.mul(q, edges.upper[:, None], out=bound), out=rows)
        inside, zero_mass = self.geometry.inside, self.geometry.zero_mass
        if inside is not None:
            share = edges.leaked / torch.where(zero_mass > 0, zero_mass, 1.0)
            rows.copy_(torch.where(inside, rows, p * share[:, None]))
        for ends, end in ((edges.lossless, q), (edges.whole, p)):
            if bool(ends.any()):
                rows[ends] = end[ends]

    def _measure(self, rows: Rows) -> tuple[PerRow, PerRow, PerRow, PerRow]:
        """Return acceptance, divergence, price and gap."""
        geometry, edges = self.geometry, self.edges
        out = scratch("solve.bound", rows.shape, rows.dtype, rows.device)
        accepted = torch.minimum(geometry.p, rows, out=out).sum(-1)
        generated, spent = geometry.measure(rows)
        price = geometry.price(edges.lower, edges.upper, spent)
        if bool(edges.lossless.any()):
            price = torch.where(edges.lossless, geometry.lossless_price(), price)
        gap = geometry.bound(edges, generated) - accepted
        exact = edges.lossless | edges.slack
        return (
            accepted,
            torch.where(edges.lossless, 0.0, spent),
            torch.where(edges.slack, 0.0, price),
            torch.where(exact, 0.0, gap),
        )


def solve_band(geometry: Geometry, knob: str, amount: PerRow) -> Band:
    """Return the bands for ``knob`` (delta, price or acceptance) at ``amount`` per row.

    Newton where it converges; the sorted path, which is the reference, for the other rows.
    """
    solution = _newton(geometry, knob, amount)
    if solution is None:
        return Band(geometry, _sorted(geometry, knob, amount))
    edges, done = solution
    unsolved = (~done).nonzero()[:, 0]
    if len(unsolved):
        rest = _sorted(geometry.of_rows(unsolved), knob, amount[unsolved])
        for field in fields(Edges):
            getattr(edges, field.name)[unsolved] = getattr(rest, field.name)
    return Band(geometry, edges)


def _newton(geometry: Geometry, knob: str, amount: PerRow) -> tuple[Edges, Flags] | None:
    """Return Newton's edges and which rows converged, None where it does not apply."""
    f, kind = geometry.generator, geometry.divergence
    if not (len(amount) and f.smooth) or (geometry.free and bool((geometry.zero_mass > 0).any())):
        return None
    if knob == "delta":
        amount = kind.to_generator(amount)
    elif knob != "price" or kind is not f:  # else the price depends on what is spent
        return None
    return newton_edges(geometry.q, geometry.p, f, knob, amount)


def _sorted(geometry: Geometry, knob: str, amount: PerRow) -> Edges:
    """Return the bands found on the sorted path."""
    path = geometry.path
    rejection = _locate(geometry, knob, amount)
    lossless = rejection >= path.largest
    slack = (rejection <= path.smallest) & ~lossless
    point = path.at(rejection)
    leaked = torch.zeros_like(rejection)
    if geometry.free:
        leaked = (path.zero_mass - rejection).clamp(min=0.0)
    lower = torch.where(lossless, 1.0, point.lower)
    upper = torch.where(lossless, 1.0, point.upper)
    edges = Edges(lower, upper, leaked, lossless, slack, slack & (rejection <= 0))
    return geometry.within(edges, amount) if knob == "delta" else edges


def _locate(geometry: Geometry, knob: str, amount: PerRow) -> PerRow:
    """Return ε for the requested budget, price or acceptance."""
    path = geometry.path
    end = path.at(path.smallest)
    spent = geometry.spent(end.upper, end.divergence)
    if knob == "delta":
        slack, lossless = spent <= amount, amount == 0
        rejection = geometry.rejection(torch.where(slack | lossless, 0.0, amount))
    elif knob == "price":

        def price_at(point: Point) -> Tensor:
            at = geometry.spent(point.upper, point.divergence)
            return geometry.price(point.lower, point.upper, at)

        def cheap(rejection: Tensor) -> Tensor:
            return price_at(path.at(rejection)) <= amount

        slack, lossless = amount <= price_at(end), amount == math.inf
        rejection, _ = halved(path.smallest, path.largest, cheap)
    else:
        reachable = geometry.reachable
        if bool((amount > reachable + ACCEPTANCE_SLACK).any()):
            row = int((amount - reachable).argmax())
            raise ValueError(
                f"acceptance: must not exceed {reachable[row].item():.12g}, the draft's mass where "
                f"the target has any; got {amount[row].item():g}"
            )
        slack, lossless = amount >= reachable, 1 - amount >= path.largest
        rejection = torch.minimum(torch.maximum(1 - amount, path.smallest), path.largest)
    rejection = torch.where(slack, path.smallest, rejection)
    return torch.where(lossless, path.largest, rejection)


def chosen_knob(divergence: Divergence, **knobs: Any) -> tuple[str, Any, float]:
    """Return the one knob that was given, with its upper limit."""
    names = [name for name, value in knobs.items() if value is not None]
    if len(names) != 1:
        shown = " and ".join(names) or "none of them"
        raise ValueError(f"delta, price, acceptance: exactly one must be given; got {shown}")
    if names[0] == "price" and not divergence.priced:
        raise ValueError(
            f"price: {divergence.spec} has no one-to-one price; name delta= or acceptance= "
            f"instead; got {knobs['price']!r}"
        )
    return names[0], knobs[names[0]], 1.0 if names[0] == "acceptance" else math.inf


def edges(
    q: Rows,
    p: Rows,
    divergence: str | Divergence,
    delta: float | PerRow | None = None,
    price: float | PerRow | None = None,
    ceiling: Rows | None = None,
) -> tuple[Float[Tensor, "rows 1"], Float[Tensor, "rows 1"]]:
    """Return the edges (a, b) of each row's band, float64 rows (R, V) that sum to 1.

    Exactly one of ``delta`` (the budget) and ``price`` (dA/dδ), a number or one a row. Without
    a sort where Newton converges. (0, ∞) stands for h = p and (1, 1) for h = q. Tokens with q = 0
    get nothing. Rows are not validated: callers check them first.

    With ``ceiling``, c ≥ 1 for each token, ∞ for none, they are the edges of the best row with
    h ≤ cq, which is clip(p, aq, min(b, c)q): each token gains as before up to cq, and nothing
    beyond. What the draft has above cq can no more be accepted than what it has where q = 0, so the
    path ends at a row of its own and not at p.

    Raises
    ------
    ValueError
        None or both of delta and price; a price of a divergence that has none.
    """
    kind = find_divergence(divergence)
    knob, amount, _ = chosen_knob(kind, delta=delta, price=price)
    if ceiling is not None:
        within = torch.minimum(p, torch.where(q > 0, ceiling * q, 0.0))
        above = (p - within).sum(-1, keepdim=True)
        q, p = torch.cat([q, torch.zeros_like(above)], -1), torch.cat([within, above], -1)
    amounts = torch.as_tensor(amount, dtype=torch.float64, device=q.device).expand(len(q))
    with torch.no_grad():
        bands = solve_band(geometry_of(q, p, kind), knob, amounts).edges
    lower = torch.where(bands.whole, 0.0, bands.lower)
    upper = torch.where(bands.whole, torch.inf, bands.upper)
    return lower[:, None], upper[:, None]
