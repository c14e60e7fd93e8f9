r"""The band of one row on a CPU, solved by compiled loops if numba is installed.

Under the band h = clip(p, aq, bq) a token n with coin u is accepted iff r = u p_n/q_n is below the
upper edge b. Whether r < b is decided first; only a rejection needs the whole band, for the
residual (aq − p)₊ (THEORY.md, Theorem 15). :mod:`cactus_theory.verify.node` computes r.

A row belongs to a node of a drafted path. The alive ratio P is the probability that block
verification accepts the path up to the node (:class:`cactus_theory.policies.policy.PathState`); a
row by itself has P = 1. The mass emitted at the node is g = P h with the band h of p/P (Theorem 13,
if no value is put on later tokens):

.. math:: g = \mathrm{clip}(p,\; A q,\; U q), \qquad Σ g = P, \qquad f'(U/P) − f'(A/P) = 1/ν

The last equation is for a price ν, in tokens per unit of divergence; within a budget δ the equation
D(h‖q) = δ takes its place. If only a head of likely tokens may rise above q, the other tokens have
an upper edge of at most P (Theorem 24). Rows need not sum to 1: Σ g is P Σp, and q is divided by
its sum. Edges are compared with p/q as it is before this division: "in the row's units".

f′ is compiled for the classes of ``CURVES``. For other divergences, without numba and on a device
the bands of a batch are searched for in torch (:mod:`cactus_theory.optimum.batch_edges`).
"""

import math
import warnings
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from cactus_theory.base.tensors import from_numpy
from cactus_theory.base.tolerances import LEAST, MOST
from cactus_theory.divergences import FDivergence
from cactus_theory.divergences import classical as known
from cactus_theory.optimum.batch_edges import edges
from cactus_theory.optimum.boxes import FREE, NO_BOXES, Boxes

Row = np.ndarray
# entries of a row that are worked on at once, so that they stay in the CPU's cache
PART = 2**14
# classes whose costs f(t) − f′(1)(t − 1) a compiled loop writes
COSTS = known.KL, known.JensenShannon
# share of P up to which U needs no search, as U ≥ P; below 1 since sums of rows may miss 1
SURE = 1 - 2e-4
# c and a of f″(t) = c t^(a−2); a = NaN stands for the Jensen-Shannon divergence, ½/(t(1 + t))
CURVES: dict[type, tuple[float, float]] = {
    known.KL: (1.0, 1.0),
    known.ReverseKL: (1.0, 0.0),
    known.PearsonChi2: (2.0, 2.0),
    known.NeymanChi2: (2.0, -1.0),
    known.SquaredHellinger: (0.5, 0.5),
    known.JensenShannon: (0.5, math.nan),
}


@cache
def loops() -> Any:
    """Return the compiled loops by name; if numba does not load, warn once and return None."""
    try:
        names = ("passes", "refills", "row_edges")
        files = (import_module(f"cactus_theory.optimum.{name}") for name in names)
        return SimpleNamespace(
            **{name: loop for file in files for name, loop in vars(file).items()}
        )
    except Exception as error:  # a broken build of numba may raise anything
        warnings.warn(
            f"numba does not load ({type(error).__name__}: {error}); rows on the CPU are solved "
            "more slowly, by the same laws",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def is_compiled(f: Any) -> bool:
    """Return whether compiled loops solve the bands of the f-divergence ``f``."""
    return curve_of(f) is not None and loops() is not None


@cache
def warm() -> None:
    """Compile the loops that rows at a price need, or load them from numba's cache."""
    if (compiled := loops()) is None:
        return
    for dtype in (np.float32, np.float64):
        q, p = np.array([[0.5, 0.5], [0.9, 0.1]], dtype)
        row = PricedRow(q, p, PricedBand(known.KL(), 1.0))
        row.write(q, p, np.empty(2))
        compiled.draw_left(q, p, 1.0, 0.5)
        compiled.whole_charge(q, p, row.band, np.empty(0), True, 1.0, 0.1)
        compiled.directions_of(q, p, row.band, np.empty(0), q)


def curve_of(f: object) -> tuple[float, float] | None:
    """Return c and a of f″(t) = c t^(a−2), as in ``CURVES``; None if f′ is not compiled."""
    return (1.0, f.a) if type(f) is known.Alpha else CURVES.get(type(f))


def costs_of(f: FDivergence, ratios: Row) -> Row:
    """Return f(t) − f′(1)(t − 1) of ratios t = h/q, by a compiled loop if there is one."""
    if type(f) not in COSTS:
        return f.centred(from_numpy(ratios)).numpy()
    loops().write_costs(ratios, type(f) is known.KL, costs := np.empty_like(ratios))
    return costs


class PricedBand:
    """Constants of the bands of all rows at one price ν, whose edges are a ≤ 1 ≤ u.

    ``step`` is 1/ν = f′(u) − f′(a). ``high`` is the largest u, that of a = 1: the u at which f′
    exceeds f′(1) by ``step``, or ∞.
    """

    def __init__(self, f: FDivergence, price: float) -> None:
        self.step, self.curve = min(1 / price, MOST), curve_of(f)
        self.high = f.upper_edge(self.step)


class NodeRow:
    """The row h at one node, solved only as far as the decision about a drafted token requires.

    This base class is lossless: h = q at a node that is reached with probability P. Subclasses
    solve a band. Once :meth:`upper_exceeds` has solved the band, ``scale`` is A and ``upper`` is U:
    g = P h is p kept between A q and U q, except for tokens with ``boxes``. A row whose h does not
    depend on P is solved for P = 1, and g is then ``factor`` (P) times the solved row.
    """

    alive, factor, boxes = 1.0, 1.0, FREE
    unit: float  # P in the units of p/q, once solved
    is_solved = False
    compiled = True  # whether compiled loops write the row

    def __init__(self, alive: float) -> None:
        self.alive = self.upper = self.scale = self.unit = alive

    def upper_exceeds(self, threshold: float) -> bool:
        """Return whether the upper edge U exceeds ``threshold``; after False, U and A are known."""
        if threshold <= self.alive * SURE:
            return True
        if not self.is_solved:
            self._solve(threshold)
            self.is_solved = self.upper <= threshold
        return self.upper > threshold

    def _solve(self, threshold: float) -> None:
        """Solve the edges U and A; if U > ``threshold``, U may be stored as ∞ and A is no edge."""

    def exceeds(self, token: int, ratio: float) -> bool:
        """Return whether the token's upper edge of g/q exceeds ``ratio``; after False h is known.

        If ``factor`` is below 1, False may also mean that the answer is not known. The caller then
        compares :meth:`ratio_of` (Theorem 15).
        """
        return self.upper_exceeds(ratio if self.factor == 1 else math.inf)

    def ratio_of(self, token: int, q_n: float, p_n: float) -> float:
        """Return g/p of a token with q = ``q_n`` and p = ``p_n``; the row must be solved."""
        if p_n == 0:
            return math.inf if q_n >= LEAST else 0.0
        return self.raised(token, q_n, p_n) / (p_n / q_n) if q_n >= LEAST else 0.0

    def raised(self, token: int, q_n: float, p_n: float) -> float:
        """Return g/q of a token with q = ``q_n`` and p = ``p_n``; the row must be solved."""
        q_n, p_n = float(q_n), float(p_n)  # p/q of float32 entries may overflow
        if not q_n >= LEAST:
            return 0.0
        lower, upper = self.scale, self.upper
        head_least, ids, ceilings = self.boxes
        if q_n < head_least:  # off the head
            upper = min(upper, self.unit)
        if ids.size:
            for box in (ids == token).nonzero()[0].tolist():  # the token must not fall
                lower, upper = self.unit, min(upper, float(ceilings[box]) * self.unit)
        return self.factor * max(lower, min(upper, p_n / q_n))

    @property
    def left(self) -> float:
        """Return the scale s of the residual (s q − p)₊; tokens in ``levels`` have other scales."""
        return self.factor * self.scale

    @property
    def levels(self) -> dict[int, float]:
        """Return, by token id, the residual's scale at tokens that must not fall below q."""
        return dict.fromkeys(self.boxes[1].tolist(), self.factor * self.unit)

    def law_at(self, token: int, q: Row, p: Row) -> float:
        """Return the emitted probability h of a token; the row must be solved."""
        mass, _ = loops().sums_of(q, p)
        g_n = self.raised(token, q[token], p[token]) * float(q[token])
        return g_n / (self.factor * self.unit * mass)

    def write(self, q: Row, p: Row, out: Row) -> None:
        """Solve the row, and write a multiple of h to ``out``; callers divide it by its sum."""
        self.upper_exceeds(math.inf)  # no edge exceeds ∞, so the row is solved
        if self.boxes is FREE and (q > LEAST).all():
            np.clip(p, self.scale * q, min(self.upper, MOST) * q, out=out)
            return
        loops().write_ratios(q, p, self.band, 0, out)
        out *= q

    @property
    def band(self) -> tuple[float, float, float, Any] | None:
        """Return A, U, P in units of p/q, and the boxes; None if the row is no band."""
        return self.scale, min(self.upper, MOST), self.unit, self.boxes


class DraftRow(NodeRow):
    """The row h = p, for rows with q > 0 wherever p > 0."""

    def __init__(self, q: Row, p: Row, alive: float) -> None:
        mass, drafted = loops().sums_of(q, p)
        self.upper, self.scale, self.factor = math.inf, 0.0, alive
        self.unit = drafted / mass if mass else math.nan


class AheadRow(NodeRow):
    """The row h that is ``raised`` at the drafted token and proportional to q at other tokens.

    :class:`cactus_theory.optimum.look_ahead.LookAhead` finds ``raised`` from the tokens drafted
    later. Other tokens that must not fall keep their q.
    """

    def __init__(self, q: Row, token: int, raised: float, alive: float, boxes: Boxes) -> None:
        self.q, self.token, self.raised_to, self.alive = q, token, raised, alive
        self.boxes = boxes.of_row(q)
        self.upper = self.scale = self.unit = alive

    def _solve(self, threshold: float) -> None:
        """Solve U, which is g/q of the drafted token, and A, which is g/q of the other tokens."""
        stays = [other for other in self.boxes[1].tolist() if other != self.token]
        mass, kept = float(self.q.sum(dtype=np.float64)), float(self.q[stays].sum(dtype=np.float64))
        if not mass > 0:  # no distribution: an error is raised where a token is drawn from the row
            return
        q_n = float(self.q[self.token])
        # the other tokens share what the drafted token and the kept tokens leave of h
        rest, left = mass - q_n - kept, 1 - self.raised_to - kept / mass
        self.unit = self.alive / mass
        self.upper = self.alive * self.raised_to / q_n if q_n >= LEAST else self.alive
        # at most P, as no other token rises; if all others stay, both are rounding
        self.scale = self.alive * min(1.0, max(0.0, left / rest)) if rest > 0 else 0.0


class PricedRow(NodeRow):
    """The band of one row (V,) at a price, solved as far as :meth:`upper_exceeds` needs.

    ``alive`` is P, the probability with which the node is reached.
    """

    def __init__(
        self, q: Row, p: Row, band: PricedBand, alive: float = 1.0, boxes: Boxes = NO_BOXES
    ) -> None:
        self.q, self.p = np.ascontiguousarray(q), np.ascontiguousarray(p)
        self.priced, self.alive = band, alive
        self.boxes = boxes.of_row(self.q)

    def _solve(self, threshold: float) -> None:
        """Solve U and A; the search stops once it is proven that U exceeds ``threshold``."""
        band = self.priced
        self.upper, self.scale, self.unit = loops().edges_at_price(
            self.q, self.p, self.alive, band.curve, band.step, band.high, self.boxes, threshold
        )

    def exceeds(self, token: int, ratio: float) -> bool:
        """Return whether the token's upper edge exceeds ``ratio``, also for tokens with boxes."""
        if self.boxes is FREE:  # saves the comparison with an array of ids
            return super().exceeds(token, ratio)
        head_least, ids, *_ = self.boxes
        if self.q[token] >= head_least and token not in ids:
            return super().exceeds(token, ratio)
        if ratio <= self.factor * self.alive * SURE:  # no ceiling C is below 1
            return True
        self.upper_exceeds(math.inf)  # solves the row, as no edge exceeds ∞
        # with p = ∞ the token's g/q is its upper edge
        return self.factor == 1 and self.raised(token, self.q[token], math.inf) > ratio


class BudgetRow(NodeRow):
    """The band of one row (V,) within a budget of f; a search finds both edges at once."""

    def __init__(self, q: Row, p: Row, f: FDivergence, delta: float) -> None:
        self.q, self.p = np.ascontiguousarray(q), np.ascontiguousarray(p)
        self.f, self.delta = f, delta

    def _solve(self, threshold: float) -> None:
        """Solve the edges U and A, whatever ``threshold`` is."""
        q, p, curve = self.q, self.p, curve_of(self.f)
        assert curve is not None  # Bands.row makes this row only if f′ is compiled
        mass, drafted = loops().sums_of(q, p)
        unit = drafted / mass if mass else math.nan
        self.upper, self.scale, self.unit = math.inf, 0.0, unit
        if not (0 < mass < math.inf and 0 < drafted < math.inf):  # a draw raises the error
            return
        cost, least, most = np.empty(q.size), 1.0, 1.0
        no_edges = 0.0, MOST, unit, FREE  # a band in which h is p
        for start in range(0, q.size, PART):
            at = slice(start, start + PART)
            ratio = cost[at]  # a view: first the ratios, then their costs are written there
            loops().write_ratios(q[at], p[at], no_edges, start, ratio)
            least, most = min(least, float(ratio.min())), max(most, float(ratio.max()))
            np.multiply(costs_of(self.f, ratio), q[at], out=ratio)
        endless = False
        if self.f.at_zero == math.inf:  # h = p costs ∞ at tokens with p = 0
            empty = (p == 0) & (q > LEAST)
            endless, cost[empty] = bool(empty.any()), 0.0
        self.upper, self.scale, converged = loops().edges_within(
            q, p, cost, endless, curve, self.delta, unit, drafted, (least, most), FREE
        )
        if not converged:  # search in torch, and on the sorted path if that does not converge
            target, draft = (from_numpy(row[None]).double() for row in (q, p))
            target, draft = target / target.sum(), draft / draft.sum()
            lower, upper = edges(target, draft, self.f, "delta", self.delta)
            self.upper, self.scale = unit * float(upper), unit * float(lower)
