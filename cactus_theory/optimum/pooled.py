r"""The best mean acceptance of many rows within one mean divergence: one price for all rows.

.. math:: \max_{h_1 … h_N} \frac1N \sum_t \sum_i \min(p_{ti}, h_{ti}) \;\text{ s.t. }\;
   \frac1N \sum_t D(h_t\|q_t) \le δ

Acceptance is concave in each row's divergence, so at the optimum all rows have the same slope, the
price λ (THEORY.md, Theorem 9). With ρ = p/q, at any λ ≥ 0 and any numbers μ_t, the Lagrange dual
bounds every other way to spend δ:

.. math:: A \le λδ + \frac1N \sum_t \Big( μ_t + \sum_i q_{ti}
   \sup_u [\min(ρ_{ti}, u) − λ f(u) − μ_t u] \Big)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.chunks import parts_of
from cactus_theory.base.roots import rising_root
from cactus_theory.base.threads import one_thread
from cactus_theory.divergences import Divergence, read_divergence
from cactus_theory.optimum.batch_edges import chosen_knob, solve_edges
from cactus_theory.optimum.certificate import Geometry, Measured, geometry_of

# tolerance of a mean at its amount, relative to 1 + the amount
CLOSE = 1e-13
# limits of the price, beyond which rows are at their ends; the search ends at the last digit
LEAST_PRICE, LARGEST_PRICE, SETTLED = 1e-150, 1e150, 1e-30
# factor of the price from a point towards an end (0 or ∞), which has no logarithm
OUTWARDS = 4.0


@dataclass(frozen=True)
class PooledAcceptance:
    """The optimum over N rows together; arrays are torch or numpy, as the input is."""

    target: Any
    acceptance: Any
    divergence: Any
    mean_acceptance: float
    mean_divergence: float
    price: float
    bound: float
    gap: float


@dataclass(frozen=True)
class PooledFrontier:
    """The best mean acceptance of many rows for each of several mean divergences δ.

    Fields have the shape (points,). From point to point δ and acceptance rise, and the price falls.
    ``bound`` is the proven upper bound on the mean acceptance at each mean divergence ``delta``.
    """

    delta: Any
    acceptance: Any
    price: Any
    bound: Any


@dataclass(frozen=True)
class _Point:
    """The bands of all rows at one price, with their mean acceptance and divergence."""

    price: float
    acceptance: float
    divergence: float
    bands: Measured


@one_thread()
def pooled_acceptance(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    delta: float | None = None,
    price: float | None = None,
    acceptance: float | None = None,
    normalise: bool = False,
) -> PooledAcceptance:
    """Maximise the mean acceptance of rows (..., V) under a bound on their mean divergence.

    The result is exact up to float64 rounding for any number of rows: the search is over one
    price, and each step solves all rows at this price. Tokens with q = 0 get nothing.

    Parameters
    ----------
    target_probs, draft_probs : (..., V) probabilities, as for :func:`optimal_acceptance`.
    divergence : an f-divergence with one budget for each price: KL, reverse KL, χ², Hellinger,
        Jensen-Shannon, alpha.
    delta : mean divergence to spend, ≥ 0 (nats a row for KL).
    price : instead of delta, the price of all rows.
    acceptance : instead of delta, the mean acceptance to reach at the least mean divergence.
    normalise : as for :func:`optimal_acceptance`.

    Returns
    -------
    target : (..., V), the rows h. ``acceptance``, ``divergence`` : (...), of each row.
    mean_acceptance, mean_divergence : means over rows.
    price : the price of all rows; ∞ at δ = 0, 0 if every row accepts as much as it can.
    bound, gap : proven upper bound on the mean acceptance of any rows that spend as much, and
        bound minus mean acceptance: zero up to rounding, of either sign.

    Raises
    ------
    ValueError, TypeError
        As for :func:`optimal_acceptance`; a divergence of another kind.

    Examples
    --------
    >>> q = np.array([[0.2, 0.8], [0.5, 0.5]])
    >>> p = np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> both = ct.pooled_acceptance(q, p, delta=0.05)
    >>> alone = ct.optimal_acceptance(q, p, delta=0.05).acceptance.mean()
    >>> print(f"{both.mean_acceptance:.4f}; with 0.05 for each row {alone:.4f}")
    0.7366; with 0.05 for each row 0.7176
    """
    kind, geometry, batch = _pool(target_probs, draft_probs, divergence, normalise)
    knob, amount, most = chosen_knob(kind, delta=delta, price=price, acceptance=acceptance)
    amount = check.number(knob, amount, 0.0, most)
    point = _point(geometry, amount) if knob == "price" else _point_at(geometry, knob, amount)
    bound = _bound(geometry, point)
    return PooledAcceptance(
        target=tensors.like(point.bands.rows.reshape(*batch, -1), target_probs),
        acceptance=tensors.scalar_like(point.bands.acceptance.reshape(batch), target_probs),
        divergence=tensors.scalar_like(point.bands.divergence.reshape(batch), target_probs),
        mean_acceptance=point.acceptance,
        mean_divergence=point.divergence,
        price=point.price,
        bound=bound,
        gap=bound - point.acceptance,
    )


@one_thread()
def pooled_frontier(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    points: int = 33,
    normalise: bool = False,
    on_point: Callable[[int], Any] | None = None,
) -> PooledFrontier:
    """Return the best mean acceptance of rows (..., V) at several mean divergences, with bounds.

    The first point is h = q, the last the largest acceptance. Each further point is solved exactly,
    at a price between those of the two neighbours whose acceptances differ most. ``normalise`` is
    as for :func:`optimal_acceptance`; ``on_point`` is called with the number of points done.

    Raises
    ------
    ValueError, TypeError
        As for :func:`pooled_acceptance`; fewer than two points.

    Examples
    --------
    >>> q = np.array([[0.2, 0.8], [0.5, 0.5]])
    >>> p = np.array([[0.9, 0.1], [0.6, 0.4]])
    >>> curve = ct.pooled_frontier(q, p, points=3)
    >>> bool((curve.bound - curve.acceptance < 1e-9).all()), curve.acceptance.round(3)
    (True, array([0.6  , 0.752, 1.   ]))
    """
    _, geometry, _ = _pool(target_probs, draft_probs, divergence, normalise)
    count = check.as_whole_number("points", points, 2)
    curve = [_point(geometry, math.inf), _point(geometry, 0.0)]
    while len(curve) < count and curve[0].acceptance < curve[-1].acceptance:
        gaps = [after.acceptance - before.acceptance for before, after in pairwise(curve)]
        place = gaps.index(max(gaps)) + 1
        curve.insert(place, _point(geometry, _between(curve[place - 1], curve[place])))
        if on_point is not None:
            on_point(len(curve))
    fields = [
        (point.divergence, point.acceptance, point.price, _bound(geometry, point))
        for point in curve
    ]
    columns = torch.tensor(fields, dtype=torch.float64, device="cpu").T.contiguous()
    return PooledFrontier(*(tensors.scalar_like(column, target_probs) for column in columns))


def _pool(
    target_probs: Any, draft_probs: Any, divergence: str | Divergence, normalise: bool
) -> tuple[Divergence, Geometry, torch.Size]:
    kind = read_divergence(divergence)
    if not (kind.additive and kind.priced):
        raise ValueError(
            f"divergence: must be an f-divergence with a one-to-one price to be pooled; "
            f"got {kind.spec!r}"
        )
    q, p = tensors.probability_rows(target_probs, draft_probs, normalise)
    if not q.numel():
        raise ValueError(f"target_probs: must hold a row; got {tensors.describe(q)}")
    flat_q, flat_p = (row.reshape(-1, q.shape[-1]) for row in (q, p))
    return kind, geometry_of(flat_q, flat_p, kind), q.shape[:-1]


def _point(geometry: Geometry, price: float) -> _Point:
    with torch.no_grad():
        prices = torch.full_like(geometry.q[:, 0], price)
        bands = geometry.measured(solve_edges(geometry, "price", prices))
    return _Point(price, float(bands.acceptance.mean()), float(bands.divergence.mean()), bands)


def _point_at(geometry: Geometry, knob: str, amount: float) -> _Point:
    """Return the point whose mean divergence or acceptance (``knob``) is ``amount``.

    If ``amount`` is beyond the ends (price ∞ or 0), return the end; ValueError for an acceptance
    that no rows reach. The search is over ln λ. Of all points tried whose mean does not exceed
    ``amount``, the one with the least price is returned.
    """
    close = CLOSE * (1 + amount)
    strict, whole = _point(geometry, math.inf), _point(geometry, 0.0)

    def excess(point: _Point) -> float:
        return (point.divergence if knob == "delta" else point.acceptance) - amount

    if knob == "acceptance" and excess(whole) < -close:
        raise ValueError(
            f"acceptance: must not exceed {whole.acceptance:.12g}, the draft's mean mass where "
            f"the target has any; got {amount:g}"
        )
    if amount == math.inf or excess(whole) <= close:
        return whole
    if excess(strict) >= -close:
        return strict
    tried = [strict]

    def lack(price: float) -> float:
        """Return ln(gain to reach / gain at this price), which is nearly linear in ln λ."""
        tried.append(_point(geometry, price))
        gained = excess(tried[-1]) - excess(strict)
        if abs(excess(tried[-1])) <= close:
            return 0.0
        return math.log(-excess(strict) / gained) if gained > 0 else math.inf

    # only the points that the search tries are used, not the root
    rising_root(
        lack, low=LEAST_PRICE, high=LARGEST_PRICE, start=1.0, settled=SETTLED, steepness=1.0
    )
    return min((point for point in tried if excess(point) <= close), key=lambda point: point.price)


def _between(left: _Point, right: _Point) -> float:
    """Return a price between two points; the price of the first may be ∞, of the second 0."""
    if left.price == math.inf:
        return 1.0 if right.price == 0 else OUTWARDS * right.price
    return left.price / OUTWARDS if right.price == 0 else math.sqrt(left.price * right.price)


def _bound(geometry: Geometry, point: _Point) -> float:
    """Return the Lagrange bound on the mean acceptance at the point's mean divergence."""
    if point.price in (0.0, math.inf):  # 0: all that can be accepted; ∞: the only rows at δ = 0
        return float(geometry.reachable.mean()) if point.price == 0 else point.acceptance
    f, edges = geometry.generator, point.bands.edges
    # the best u is ρ kept between a and the b with f′(b) − f′(a) = 1/λ
    edges = replace(edges, upper=f.ratio_at(f.slope(edges.lower) + 1 / point.price))
    # the bounds of rows that spend nothing; λδ is added below
    spent = torch.zeros_like(edges.lower)
    bounds = [
        geometry.of_rows(at).bound(edges.of_rows(at), spent[at], point.price)
        for at in parts_of(geometry.q)
    ]
    return point.price * point.divergence + float(torch.cat(bounds).mean())
