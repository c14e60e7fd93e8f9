"""The whole trade-off between acceptance and divergence (THEORY.md, Theorems 9 and 19)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.divergences import Divergence
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.optimum.acceptance import SUPPORTS
from cactus_theory.optimum.geometry import Geometry, geometry_of


@dataclass(frozen=True)
class Frontier:
    """Points (..., points) of the optimal trade-off, from h = q to the end of the path.

    Attributes
    ----------
    delta : divergence, in its unit (nats for KL), rising.
    acceptance : Σ min(p, h), rising.
    price : dA/dδ; falling, except for Rényi of order above 1 and the max-divergence, where it
        may rise.

    Examples
    --------
    >>> curve = ct.frontier(np.array([0.2, 0.8]), np.array([0.6, 0.4]), points=3)
    >>> curve.acceptance.round(3), curve.delta.round(4)
    (array([0.6, 0.8, 1. ]), array([0.    , 0.1046, 0.3819]))
    """

    delta: Any
    acceptance: Any
    price: Any


def frontier(
    target_probs: Any,
    draft_probs: Any,
    *,
    divergence: str | Divergence = "kl",
    points: int = 64,
    support: str = "target",
) -> Frontier:
    """Return the whole optimal trade-off of each row from one sort.

    Points are equally spaced in acceptance, from h = q (δ = 0) to the end of the path.
    Shapes (..., points); δ and acceptance rise along the last axis, the price falls where the
    trade-off is concave (f-divergences, Rényi of order below 1).

    Raises
    ------
    ValueError
        As for :func:`optimal_acceptance`, or fewer than two points.

    Examples
    --------
    >>> q, p = np.array([0.2, 0.2, 0.6]), np.array([0.45, 0.45, 0.1])
    >>> curve = ct.frontier(q, p, points=3)
    >>> curve.acceptance.round(3), curve.delta.round(3)
    (array([0.5 , 0.75, 1.  ]), array([0.   , 0.127, 0.551]))
    """
    kind = find_divergence(divergence)
    check.one_of("support", support, SUPPORTS)
    count = int(check.number("points", points, 2))
    if count != points:
        raise ValueError(f"points: must be a whole number; got {points!r}")
    q, p = check.probability_rows(target_probs, draft_probs)
    flat_q, flat_p = q.reshape(-1, q.shape[-1]), p.reshape(-1, q.shape[-1])
    with torch.no_grad():
        curves = _curves(geometry_of(flat_q, flat_p, kind, support), count)
    shape = (*q.shape[:-1], count)
    stacked = (torch.stack(curve, -1).reshape(shape) for curve in curves)
    return Frontier(*(check.scalar_like(curve, target_probs) for curve in stacked))


def _curves(geometry: Geometry, count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return δ, acceptance and price at each point."""
    path, zero = geometry.path, torch.zeros_like(geometry.zero_mass)
    delta, accepted, price = [zero], [1 - path.largest], [geometry.lossless_price()]
    for share in torch.linspace(1, 0, count, dtype=torch.float64)[1:].tolist():
        point = path.at(path.smallest + share * (path.largest - path.smallest))
        spent = geometry.spent(point.upper, point.divergence)
        delta.append(spent)
        accepted.append(1 - point.rejection)
        price.append(geometry.price(point.lower, point.upper, spent))
    return delta, accepted, price
