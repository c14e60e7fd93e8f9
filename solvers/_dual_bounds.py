r"""Bound every program from above by Lagrange duality, at any multipliers.

.. math:: \max_h Σ_i \min(c_i, h_i) \;\text{ s.t. }\; l \le h \le u,\;
   Σ q f_k(h/q) \le δ_k,\; Ah \le b

Whatever λ ≥ 0 and ν ≥ 0 (any sign for equations) a solver returns, the value is at most

.. math:: λᵀδ + νᵀb + Σ_i \sup_{l_i \le h \le u_i}
   [\min(c_i, h) − Σ_k λ_k q_i f_k(h/q_i) − (Aᵀν)_i h]

and each supremum is of a concave function of one number. With one smooth f it is closed:
h/q = clip(c/q, f′⁻¹(−Aᵀν/λ), f′⁻¹((1 − Aᵀν)/λ)), inside the box. c is the draft row for the
optimal program and a one-hot row for the per-proposal one. The multipliers come from a solver, so
that a small difference between bound and value proves the solver right; no band, no sort and no
root is involved.

The block program has its own: with a multiplier α ≥ 0 of t ≤ g for every node u and token x, and
ν the price of divergence, weak duality gives for the price form, from the leaves (C = 0) to the
root,

.. math:: C(u) = \max_h Σ_x α(u, x) h_x − ν D(h\|q_u), \qquad
   β(u, x) = (1 + C(ux) − α(u, x))_+ , \qquad
   \text{value} \le 1 + C(root) + Σ_{u,x} p(ux) β(u, x)

where p(ux) is the probability of drafting ux: α h is what mass given to tokens is worth, and
β what remains of a prefix's worth 1 + C once that is paid, collected at most p(ux) times. α
comes from a solver or from anywhere else: a wrong one loosens the bound and cannot falsify it.
C itself is bounded from above by its own dual at any level λ,
:math:`λ + ν Σ_x q_x f^*((α_x − λ)/ν)`, so that no root needs to be exact.

A budget's bound is a price's: if tokens − νD ≤ B for every verifier, D ≤ κ gives
tokens ≤ B + νκ, and D ≤ κ·tokens gives tokens ≤ B/(1 − νκ).
Source: Boyd & Vandenberghe 2004, 5.1 and 5.2; theory of the one node: Csiszár 1967.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences.classical import KL

from ._conic import generator_budget, most_of
from .path_tree import PathTree

# halvings of the bracket [0, 1] of a row's entry, to 2^-100: exact to rounding
HALVINGS = 100
# halvings of the bracket of a level, to below its ulp
LEVEL_HALVINGS = 60
# least price divided by without overflow; below it a price of 0 gives a bound as well
SMALLEST_PRICE = 1e-150


def halved(low: Any, high: Any, below: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    """Return brackets, arrays or tensors, after halvings; ``below``: the root is above x."""
    where = torch.where if isinstance(low, Tensor) else np.where
    for _ in range(steps):
        middle = (low + high) / 2
        under = below(middle)
        low, high = where(under, middle, low), where(under, high, middle)
    return low, high


@dataclass
class Lagrangian:
    """A program's objective less its constraints at their multipliers; arrays are (m,).

    ``q`` is the target on tokens with q > 0, ``cap`` the caps c of the reward, ``low`` and ``high``
    the box that the row is known to stay in.
    """

    q: np.ndarray
    cap: np.ndarray
    low: np.ndarray
    high: np.ndarray
    linear: np.ndarray  # Aᵀν
    constant: float = 0.0  # λᵀδ + νᵀb
    costs: list[tuple[float, FDivergence]] = field(default_factory=list)  # λ_k and f_k

    @classmethod
    def of(cls, q: np.ndarray, cap: np.ndarray) -> "Lagrangian":
        return cls(q, cap, np.zeros_like(q), np.ones_like(q), np.zeros_like(q))

    def add_linear(self, multiplier: float, row: np.ndarray | float, right: float) -> None:
        """Charge ``multiplier`` for each unit of row·h above ``right``."""
        self.linear = self.linear + multiplier * row
        self.constant += multiplier * right

    def add_divergence(self, multiplier: float, f: FDivergence, amount: float) -> None:
        """Charge ``multiplier`` for each unit of Σ q f(h/q) above ``amount``."""
        if multiplier >= SMALLEST_PRICE and math.isfinite(amount):
            self.costs.append((multiplier, f))
            self.constant += multiplier * amount

    def add_budget(self, multiplier: float, kind: Divergence, delta: float) -> None:
        """Charge for D ≤ ``delta`` as a budget of its generator, or keep h/q below its ceiling."""
        if kind.generator is None:
            self.narrow(0.0, most_of(kind, delta) * self.q)
        else:
            self.add_divergence(multiplier, kind.generator, generator_budget(kind, delta))

    def narrow(self, low: np.ndarray | float, high: np.ndarray | float) -> None:
        self.low, self.high = np.maximum(self.low, low), np.minimum(self.high, high)

    def bound(self) -> float:
        values = [self._value(h) for h in self._candidates(np.maximum(self.low, self.high))]
        return self.constant + float(np.max(values, axis=0).sum())

    def _candidates(self, top: np.ndarray) -> list[np.ndarray]:
        """Return rows (m,) of which one is best for each token."""
        if len(self.costs) == 1 and self.costs[0][1].smooth:
            ((price, f),) = self.costs
            ends = [f.ratio_at(torch.from_numpy((c - self.linear) / price)) for c in (0, 1)]
            best = np.clip(self.cap / self.q, ends[0].numpy(), ends[1].numpy())
            return [np.clip(best * self.q, self.low, top)]
        kinks = [np.clip(row, self.low, top) for row in (self.cap, self.q)]
        rows = [self.low, top, *kinks]
        if self.costs:
            rows += halved(self.low, top, lambda h: self.slope(h) > 0, HALVINGS)
        return rows

    def _value(self, h: np.ndarray) -> np.ndarray:
        ratio = torch.from_numpy(h / self.q)
        paid = sum(price * self.q * f.f(ratio).numpy() for price, f in self.costs)
        return np.minimum(self.cap, h) - self.linear * h - paid

    def slope(self, h: np.ndarray) -> np.ndarray:
        """Return the derivative in each token's mass at the row ``h`` (m,)."""
        ratio = torch.from_numpy(h / self.q)
        paid = sum(price * f.slope(ratio).numpy() for price, f in self.costs)
        return (h < self.cap) - self.linear - paid


def lagrange_bound(
    kind: Divergence,
    q: np.ndarray,
    cap: np.ndarray,
    delta: float,
    multipliers: tuple[float, np.ndarray | float],
    zero_cap: float | None = None,
    position: np.ndarray | int = 0,
) -> float:
    """Return a proven upper bound on the value of one row, or of several that share a budget.

    ``q`` and ``cap`` (m,) are on the tokens with q > 0, ``position`` (m,) is the row of each.
    ``multipliers`` are λ of Σ q f(h/q) ≤ its budget (0 if ``delta`` is infinite), and μ, one or
    (T,), of each row's Σh = 1. ``zero_cap`` is Σc over tokens with q = 0 if mass may go there.
    """
    slope, level = multipliers[0], np.atleast_1d(multipliers[1])
    lagrangian = Lagrangian.of(q, cap)
    lagrangian.add_budget(slope, kind, delta)
    lagrangian.linear += level[position]
    bound = lagrangian.bound() + float(level.sum())
    if zero_cap is None:
        return bound
    cost = float(level[0]) + sum(price * f.slope_at_infinity for price, f in lagrangian.costs)
    outside = max(min(zero_cap, z) - cost * z for z in (0.0, zero_cap, 1.0) if z)
    return bound + max(0.0, outside)


def conjugate(f: FDivergence, slope: Tensor) -> Tensor:
    """Return f*(y) = sup over r ≥ 0 of r y − f(r)."""
    ratio = f.ratio_at(slope)
    safe = torch.where((ratio > 0) & (ratio < torch.inf), ratio, 1.0)
    value = torch.where(ratio > 0, safe * slope - f.f(safe), -f.at_zero)
    return torch.where(ratio < torch.inf, value, torch.inf)


def worth(alpha: np.ndarray, q: np.ndarray, f: FDivergence, price: float) -> np.ndarray:
    """Return C of rows (..., V): the best Σ α h − ν D(h‖q), from above by rounding at most."""
    inside = q > 0
    top = np.max(alpha, axis=-1, where=inside, initial=-np.inf)
    if price < SMALLEST_PRICE:
        return top
    if math.isinf(price):
        return np.sum(q * alpha, axis=-1, where=inside)
    rewards, rows = torch.from_numpy(np.where(inside, alpha, 0.0)), torch.from_numpy(q)
    if not f.smooth:  # linear on both sides of 1: mass leaves tokens worth less than the best
        worst = top - price * (f.slope_at_infinity + f.at_zero)
        return np.sum(q * np.maximum(alpha, worst[..., None]), axis=-1, where=inside)
    least = np.min(alpha, axis=-1, where=inside, initial=np.inf)
    level = _level(rewards, rows, f, price, *map(torch.from_numpy, (least, top)))
    # valid at any level, and tight at this one
    slope = (rewards - level[..., None]) / price
    terms = torch.where(torch.from_numpy(inside), rows * conjugate(f, slope), 0.0)
    return (level + price * terms.sum(-1)).numpy()


def _level(
    rewards: Tensor, q: Tensor, f: FDivergence, price: float, least: Tensor, top: Tensor
) -> Tensor:
    """Return the level where Σ q f′⁻¹((α − λ)/ν) falls to 1, its upper end."""

    def heavy(level: Tensor) -> Tensor:
        ratio = f.ratio_at((rewards - level[..., None]) / price)
        return torch.where(q > 0, q * ratio, 0.0).sum(-1) > 1

    low, high = least - price * f.slope_at_one, top - price * f.slope_at_one
    return halved(low, high, heavy, LEVEL_HALVINGS)[1]


def price_bound(
    tree: PathTree,
    alpha: np.ndarray,
    f: FDivergence,
    price: float,
    *,
    unit: float = 1.0,
    ends: np.ndarray | float = 0.0,
    after: np.ndarray | None = None,
) -> float:
    """Return a proven upper bound on tokens − ν·divergence of every verifier.

    ``alpha`` (nodes, V) are multipliers of t ≤ g; negative ones count as 0, and ones above what
    the prefix is worth as that. Entries with q = 0 are not read: nothing is emitted there.
    ``unit`` is what a token is worth; ``ends`` (nodes, V) and ``after`` (V^K,) are what it is worth
    on top to end a round with each recovered token, and with a bonus token after each whole path.
    """
    possible, paid = tree.possible, 0.0
    below = np.zeros(tree.vocabulary**tree.depth) if after is None else after
    ending = np.broadcast_to(ends, tree.target.shape)
    for level in reversed(tree.levels):
        q = tree.target[level]
        gained = np.maximum(unit + below.reshape(q.shape) - ending[level], 0.0)
        rewards = np.clip(alpha[level], 0.0, gained)
        first = 1 + level.start * tree.vocabulary
        chance = possible[first : first + q.size].reshape(q.shape)
        paid += float(np.sum(chance * (gained - rewards)))
        below = worth(ending[level] + rewards, q, f, price)
    return unit + float(below[0]) + paid


def lossless_multipliers(tree: PathTree, alive: np.ndarray) -> np.ndarray:
    """Return α (nodes, V) that prove the lossless block optimal among all with h = q.

    More mass on a token is worth what follows it while its prefix is not certain to be
    accepted (``alive`` < 1), and nothing otherwise.
    """
    alpha, below = np.zeros_like(tree.target), np.zeros(tree.vocabulary**tree.depth)
    for level in reversed(tree.levels):
        q = tree.target[level]
        first = 1 + level.start * tree.vocabulary
        ratio = alive[first : first + q.size].reshape(q.shape)
        possible = (q > 0) & (tree.draft[level] > 0)
        alpha[level] = np.where(possible & (ratio < 1), 1 + below.reshape(q.shape), 0.0)
        below = worth(alpha[level], q, KL(), math.inf)
    return alpha
