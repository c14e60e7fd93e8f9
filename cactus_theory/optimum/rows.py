r"""The band of one row on a CPU, walked by compiled loops where numba is installed.

A token n with coin u is accepted iff u p_n < b q_n, that is iff r = u p_n/q_n is below the band's
upper edge b, and the first look is at r itself: only a refusal needs the band, for the residual
(aq − p)₊ (THEORY.md, Theorem 15).

A row is that of a node of a drafted path, which is reached with an alive ratio P
(:class:`cactus_theory.policies.Path`), and by itself that of P = 1. What is emitted there is
g = P h with the band of p/P (Theorem 13, for later tokens that are worth nothing):

.. math:: g = \mathrm{clip}(p,\; A q,\; U q), \qquad Σ g = P, \qquad f'(U/P) − f'(A/P) = 1/ν

at a price ν, in tokens per unit of divergence; within a budget D(h‖q) = δ instead. Off a head U is
at most P, too (Theorem 24). Rows need not sum to 1: g sums to P Σp, and q is taken over its sum, so
that "the row's units" of an edge are those of p/q.

f′ is compiled for the classes of ``CURVES``. For other divergences, without numba and on a device
the bands of a batch are searched for in torch (:mod:`cactus_theory.optimum.edges`).
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from cactus_theory.base.tolerances import LEAST
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences import classical as known
from cactus_theory.optimum.certificate import geometry_of
from cactus_theory.optimum.edges import edges, solve_edges
from cactus_theory.optimum.sorted_path import PerRow, Rows

Row = np.ndarray
# ln of the largest ratio of two edges; with any alive ratio it stays within float64
FURTHEST = 500.0
# largest p/q of a token that may rise, about 1/LEAST
MOST = 4e307
# least share of the largest target probability that a token of the head has
HEAD = 0.2
# share of 1 below which u p/q is accepted unread, as the sums of the rows may miss 1
SURE = 1 - 2e-4
NOBODY = np.empty(0, np.int64)
# entries of a row whose h/q are written at once, so that they stay near the core
PART = 2**14
# c and a of f″(t) = c t^(a−2); of the Jensen-Shannon divergence ½/(t(1 + t)), by a = NaN
CURVES = {
    known.KL: (1.0, 1.0),
    known.ReverseKL: (1.0, 0.0),
    known.PearsonChi2: (2.0, 2.0),
    known.NeymanChi2: (2.0, -1.0),
    known.SquaredHellinger: (0.5, 0.5),
    known.JensenShannon: (0.5, math.nan),
}


@cache
def loops() -> Any:
    """Return the module of compiled loops, None without numba, which is said once."""
    try:
        return import_module("cactus_theory.optimum.loops")
    except Exception as error:  # a broken build of numba may raise anything
        warnings.warn(
            f"numba does not load ({type(error).__name__}: {error}); rows on the CPU are solved "
            "more slowly, by the same laws",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def is_compiled(f: Any) -> bool:
    """Return whether rows of an f-divergence are solved by compiled loops."""
    return curve_of(f) is not None and loops() is not None


def warm() -> None:
    """Compile what rows need at a price, for a cache that later processes read."""
    if (compiled := loops()) is None:
        return
    for dtype in (np.float32, np.float64):
        q, p = np.array([[0.5, 0.5], [0.9, 0.1]], dtype)
        PricedRow(q, p, PricedBand(known.KL(), 1.0)).write(np.empty(2))
        compiled.draw_left(q, p, 1.0, 0.5)


def curve_of(f: Any) -> tuple[float, float] | None:
    """Return c and a of an f-divergence whose f′ is compiled, None of others."""
    return (1.0, f.a) if type(f) is known.Alpha else CURVES.get(type(f))


class PricedBand:
    """Constants of the bands of all rows at a price; a ≤ 1 ≤ u.

    ``step`` is f′(u) − f′(a) = 1/ν, ``high`` a bound on u, ∞ where f′(∞) is no further.
    """

    def __init__(self, f: FDivergence, price: float) -> None:
        if f.scale_free:  # a higher price may accept everything
            price = max(price, 1 / FURTHEST)
        self.f, self.price, self.step = f, price, 1 / price
        self.high, self.curve = f.upper_edge(1.0, self.step), curve_of(f)


class NodeRow:
    """A row h at a node, asked only as far as a coin needs; of itself h = q, reached with P.

    g = P h is between A q and U q, ``scale`` and ``upper`` once :meth:`passes` has solved them, and
    p between those. With ``factor`` the row is one of P = 1, and g that often its own.
    """

    cap, factor, least = math.inf, 1.0, 0.0
    unit: float  # P in the units of p/q, once solved

    def __init__(self, alive: float) -> None:
        self.upper = self.scale = self.unit = alive

    def passes(self, threshold: float) -> bool:
        """Return whether U > ``threshold``; if not, U and A are solved."""
        return self.upper > threshold

    def exceeds(self, ratio: float, q_n: float) -> bool:
        """Return whether g_n/q_n > ``ratio`` of a token that p has more of; if not, solve."""
        return self.passes(ratio if self.factor == 1 else math.inf)

    def ratio_of(self, q_n: float, p_n: float, certain: bool = False) -> float:
        """Return g_n/p_n of a sampled token, once solved."""
        if p_n == 0:
            return math.inf if q_n >= LEAST else 0.0
        if q_n < LEAST:
            return 0.0
        ratio = p_n / q_n
        return self.factor * (self.raised if certain else self._raised(ratio, q_n)) / ratio

    @property
    def left(self) -> float:
        """Return the scale s of (s q − p)₊, what g leaves, once solved."""
        return self.factor * self.scale

    @property
    def level(self) -> float:
        """Return g/q of certain tokens, once solved."""
        return self.factor * self.raised

    @property
    def raised(self) -> float:
        """Return ``level`` over ``factor``; arbitrary where no certain token has q > 0."""
        raised = self._raised(math.inf)
        return raised if raised < math.inf else self.scale

    def law_at(self, token: int, q: Row, p: Row) -> float:
        """Return h of a sampled token, once solved, from the row's q and p."""
        q_n, p_n = float(q[token]), float(p[token])
        if q_n < LEAST:
            return 0.0
        mass, _ = loops().sums_of(q, p)
        return self._raised(p_n / q_n, q_n) * q_n / (self.unit * mass)

    def _raised(self, ratio: float, q_n: float = 1.0) -> float:
        """Return g/q of a token with this p/q, over ``factor``."""
        return max(self.scale, min(self.upper, self.cap, ratio))

    @property
    def edges(self) -> tuple[float, float]:
        """Return A and U."""
        self.passes(math.inf)
        return self.scale, self.upper

    @property
    def band(self) -> tuple[float, float, float, float, float]:
        """Return A, U, the least q of the head, U off it, and P, for compiled loops, once solved.

        Not beside certain tokens.
        """
        return self.scale, min(self.upper, MOST), self.least, self.unit, self.unit


class PricedRow(NodeRow):
    """The band of one row (V,) at a price, solved as far as :meth:`passes` needs.

    ``alive`` is P. Of ``certain`` tokens p is ∞ up to the g/q at which Σ g is Σ p: the band of the
    selection law of these and one sampled from p, 0 for none. Off the ``head``, tokens with
    q ≥ head · max q, nothing rises.
    """

    def __init__(
        self,
        q: Row,
        p: Row,
        band: PricedBand,
        alive: float = 1.0,
        certain: Sequence[int] = (),
        head: float = 0.0,
    ) -> None:
        self.q, self.p = np.ascontiguousarray(q), np.ascontiguousarray(p)
        self.priced, self.alive, self.head = band, alive, head
        self.least = head * float(self.q.max()) if head else 0.0
        self.certain = NOBODY
        if certain:
            self.certain = np.array([token for token in certain if q[token] > 0], np.int64)

    def passes(self, threshold: float) -> bool:
        """Return whether U > ``threshold``; if not, U and A are solved."""
        if threshold <= self.alive * SURE:
            return True
        band = self.priced
        row = self.q, self.p, self.alive, band.curve, band.step, band.high
        solved = loops().edges_at_price(*row, self.head, self.certain, threshold)
        self.upper, self.scale, self.unit, self.cap, passed = solved
        return passed

    def write(self, row: Row) -> None:
        """Solve the band, and write g in the units of p: 0 where q = 0."""
        self.passes(math.inf)
        top = min(self.upper, self.cap)
        loops().write_law(self.q, self.p, self.scale, top, self.least, self.unit, row)
        row[self.certain] = top * self.q[self.certain]

    def exceeds(self, ratio: float, q_n: float) -> bool:
        """Return whether g_n/q_n > ``ratio``; off the head that is at most P."""
        rises = q_n >= self.least or ratio < self.alive
        return super().exceeds(ratio if rises else math.inf, q_n)

    def _raised(self, ratio: float, q_n: float = 1.0) -> float:
        upper = min(self.upper, self.cap) if q_n >= self.least else min(self.upper, self.unit)
        return max(self.scale, min(upper, ratio))


class BudgetRow(NodeRow):
    """The band of one row (V,) within a budget of f, as :class:`PricedRow`."""

    def __init__(self, q: Row, p: Row, f: FDivergence, delta: float) -> None:
        self.q, self.p = np.ascontiguousarray(q), np.ascontiguousarray(p)
        self.f, self.delta = f, delta

    def passes(self, threshold: float) -> bool:
        """Return whether U > ``threshold``; if not, U and A are solved."""
        if threshold <= SURE:
            return True
        mass, drafted = loops().sums_of(self.q, self.p)
        self.upper, self.scale, self.unit = math.inf, 0.0, drafted / mass if mass else math.nan
        if 0 < mass < math.inf and 0 < drafted < math.inf:  # else a draw refuses it
            self._solve(drafted / mass, drafted)
        return self.upper > threshold

    def _solve(self, unit: float, drafted: float) -> None:
        q, p, curve = self.q, self.p, curve_of(self.f)
        assert curve is not None  # the policy has looked
        cost, least, most = np.empty(q.size), 1.0, 1.0
        for start in range(0, q.size, PART):
            at = slice(start, start + PART)
            band = 0.0, MOST, 0.0, unit, unit
            loops().write_ratios(q[at], p[at], band, ratio := cost[at])
            least, most = min(least, float(ratio.min())), max(most, float(ratio.max()))
            np.multiply(_costs(self.f, ratio), q[at], out=ratio)
        endless = False
        if self.f.at_zero == math.inf and (empty := (p == 0) & (q >= LEAST)).any():
            endless, cost[empty] = True, 0.0
        row = q, p, cost, endless, curve, self.delta, unit, drafted, (least, most)
        self.upper, self.scale, found = loops().edges_within(*row)
        if not found:
            target, draft = (torch.from_numpy(row[None]).double() for row in (q, p))
            target, draft = target / target.sum(), draft / draft.sum()
            lower, upper = edges(target, draft, self.f, delta=self.delta)
            self.upper, self.scale = unit * float(upper), unit * float(lower)


class Charge(NamedTuple):
    """D(h‖q) of a row h, its acceptance Σ min(p/P, h), and the mass it raises off the head."""

    spent: float
    accepted: float
    raised: float


def charge_of(f: FDivergence, q: Row, p: Row, alive: float, law: NodeRow | Row) -> Charge:
    """Return the charge of a law at a node: a solved row, or h, float64.

    The head are tokens with q ≥ HEAD · max q. No temporary is longer than PART.
    """
    compiled, head = loops(), HEAD * float(q.max())
    if isinstance(law, NodeRow) and type(f) is known.KL:
        return Charge(*compiled.kl_charges(q, p, law.band, alive, head))
    mass, drafted = compiled.sums_of(q, p)
    ratios = np.empty(min(PART, q.size))
    total, outside = np.zeros(3), 0.0
    for start in range(0, q.size, PART):
        at = slice(start, start + PART)
        own_q, own_p = q[at], p[at]
        ratio = ratios[: own_q.size]
        if isinstance(law, NodeRow):
            compiled.write_ratios(own_q, own_p, law.band, ratio)
        else:
            outside += compiled.write_quotients(own_q, law[at], mass, ratio)
        cost = _costs(f, ratio)
        total += compiled.charges_of(own_q, own_p, ratio, cost, mass, drafted * alive, head / mass)
    spent, accepted, raised = total.tolist()
    if outside:
        spent += outside * (f.slope_at_infinity - f.slope_at_one)
    return Charge(max(spent, 0.0), accepted, raised)


def _costs(f: FDivergence, ratios: Row) -> Row:
    """Return f(t) − f′(1)(t − 1) of ratios t."""
    if type(f) is not known.KL:
        return f.centred(torch.from_numpy(ratios)).numpy()
    loops().write_kl_costs(ratios, costs := np.empty_like(ratios))
    return costs


@torch.no_grad()
def path_rows(q: Rows, p: Rows, alive: PerRow, band: PricedBand, head: float = 0.0) -> Rows:
    """Return the rows h at nodes with these P, float64, which sum to 1; nothing where q = 0.

    A row that is reached with P = 0 never occurs; it is taken for P = 1.
    """
    q, p, alive = q.double(), p.double(), torch.where(alive > 0, alive.double(), 1.0)
    rows = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    if q.device.type == "cpu" and is_compiled(band.f):
        arrays = rows.numpy(), q.numpy(), p.numpy(), alive.tolist()
        for row, own_q, own_p, ratio in zip(*arrays, strict=True):
            PricedRow(own_q, own_p, band, ratio, head=head).write(row)
    else:
        q, p = q / q.sum(-1, keepdim=True), p / (alive[:, None] * p.sum(-1, keepdim=True))
        q = torch.where(q < LEAST, 0.0, q)  # NaN stays
        geometry = geometry_of(q, p, band.f, lacking=1 - 1 / alive)
        bands = solve_edges(geometry, "price", torch.full_like(alive, band.price))
        geometry.write_rows(bands, rows)
    return rows.div_(rows.sum(-1, keepdim=True))
