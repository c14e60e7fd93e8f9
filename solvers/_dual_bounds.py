r"""Compute upper bounds on the programs by Lagrange duality, valid for any multipliers.

A solver's answer is accepted if its value meets the bound at the solver's multipliers: a small
difference proves the answer optimal. A row's program has the form

.. math:: \max_h Σ_i \min(c_i, h_i) \;\text{ s.t. }\; l \le h \le u,\;
   Σ q f_k(h/q) \le δ_k,\; Ah \le b

For any λ ≥ 0 and ν ≥ 0 (any sign for equations), the optimum is at most

.. math:: λᵀδ + νᵀb + Σ_i \sup_{l_i \le h \le u_i}
   [\min(c_i, h) − Σ_k λ_k q_i f_k(h/q_i) − (Aᵀν)_i h]

where each supremum is over a concave function of one number. With one smooth f the supremum is at
h/q = clip(c/q, f′⁻¹(−Aᵀν/λ), f′⁻¹((1 − Aᵀν)/λ)), kept between l and u. The cap c is the draft row
in :mod:`solvers.optimal` and a one-hot row in :mod:`solvers.per_proposal`. The closed forms under
test (bands, sorts, roots) are not used, so the proof is independent of them.

The block program (:mod:`solvers.block`, which defines t and g) has a similar bound. Let α(u, x) ≥ 0
be a multiplier of t(ux) ≤ g(u, x) for every node u and token x, and ν the price of divergence. From
the leaves (C = 0) to the root, weak duality gives

.. math:: C(u) = \max_h Σ_x α(u, x) h_x − ν D(h\|q_u), \qquad
   β(u, x) = (1 + C(ux) − α(u, x))_+ , \qquad
   \text{value} \le 1 + C(root) + Σ_{u,x} p(ux) β(u, x)

where p(ux) is the probability of drafting ux. To accept x after u gains 1 + C(ux): the token x, and
what follows. The reward α h counts a part of this gain, and β is the rest, which is collected with
probability at most p(ux). α may come from a solver or anywhere else: a wrong α loosens the bound
but does not make it false. C in turn is bounded from above by its dual at any number λ,
:math:`λ + ν Σ_x q_x f^*((α_x − λ)/ν)`, so that no root has to be exact.

The bound for a budget follows from the bound B at a price. If tokens − νD ≤ B for every verifier,
then D ≤ κ gives tokens ≤ B + νκ, and D ≤ κ·tokens gives tokens ≤ B/(1 − νκ).
Source: Boyd & Vandenberghe 2004, 5.1 and 5.2; theory of a single node: Csiszár 1967.
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

from ._divergence_budget import generator_budget, most_of
from .path_tree import PathTree

# halvings of the bracket [0, 1] of a row's entry, to 2^-100: exact up to rounding
HALVINGS = 100
# halvings of the bracket of a level, to below the rounding of the level
LEVEL_HALVINGS = 60
# least price that can be divided by without overflow; for a smaller price, 0 gives a valid bound
SMALLEST_PRICE = 1e-150


def halved(low: Any, high: Any, below: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    """Halve brackets of roots ``steps`` times, for arrays or tensors at once, and return them.

    ``below(x)`` is True where x lies below the root, so a root stays between ``low`` and ``high``.
    """
    where = torch.where if isinstance(low, Tensor) else np.where
    for _ in range(steps):
        middle = (low + high) / 2
        under = below(middle)
        low, high = where(under, middle, low), where(under, high, middle)
    return low, high


@dataclass
class Lagrangian:
    """The Lagrangian of a row's program: the objective less the constraints times multipliers.

    Arrays are (m,), on the tokens with q > 0: ``q`` is the target, ``cap`` the caps c of the
    reward min(c, h), ``low`` and ``high`` the box that contains every allowed row.
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
        """Charge ``multiplier`` for each unit of Σ q f(h/q) above its value at D = ``delta``.

        f is the generator of the divergence. Without a generator h/q is capped instead.
        """
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
        """Return rows (m,) such that for each token one of the rows has the best entry.

        With one smooth f the best entry has a closed form. Otherwise the concave function of an
        entry has its maximum at an end of the box, at a kink, or where the slope changes sign,
        which halving brackets.
        """
        if len(self.costs) == 1 and self.costs[0][1].smooth:
            ((price, f),) = self.costs
            # min(c, h) rises with slope 1 below c and is flat above
            lower, upper = (
                f.ratio_at(torch.from_numpy((rise - self.linear) / price)).numpy()
                for rise in (0, 1)
            )
            best = np.clip(self.cap / self.q, lower, upper)
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
        """Return the derivative of the Lagrangian in each token's mass at the row ``h`` (m,)."""
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
    """Return a proven upper bound on the value of one row, or of several rows with one budget.

    Parameters
    ----------
    kind : the divergence.
    q, cap : (m,) target and caps c, on the tokens with q > 0.
    delta : the budget, in the divergence's unit.
    multipliers : λ of the budget, written as a limit on Σ q f(h/q) with the generator f (0 if
        ``delta`` is infinite), and μ of each row's Σh = 1, a number or (rows,).
    zero_cap : Σc over the tokens with q = 0 (one row only); None if they may not have mass.
    position : (m,) the row of each token.
    """
    price_of_cost, level = multipliers[0], np.atleast_1d(multipliers[1])
    lagrangian = Lagrangian.of(q, cap)
    lagrangian.add_budget(price_of_cost, kind, delta)
    lagrangian.linear += level[position]  # with μ below: μ (1 − Σh) of each row
    bound = lagrangian.bound() + float(level.sum())
    if zero_cap is None:
        return bound
    cost = float(level[0]) + sum(price * f.slope_at_infinity for price, f in lagrangian.costs)
    # min(zero_cap, z) − cost·z is concave in the mass z, so it is largest at 0, zero_cap or 1;
    # at z = 0 it is 0, also for an infinite cost, where cost·z would be NaN
    outside = max(min(zero_cap, z) - cost * z for z in (zero_cap, 1.0) if z)
    return bound + max(0.0, outside)


def conjugate(f: FDivergence, slope: Tensor) -> Tensor:
    """Return the convex conjugate f*(y) = sup over r ≥ 0 of r y − f(r), at y = ``slope``."""
    ratio = f.ratio_at(slope)
    safe = torch.where((ratio > 0) & (ratio < torch.inf), ratio, 1.0)
    value = torch.where(ratio > 0, safe * slope - f.f(safe), -f.at_zero)
    return torch.where(ratio < torch.inf, value, torch.inf)


def worth(alpha: np.ndarray, q: np.ndarray, f: FDivergence, price: float) -> np.ndarray:
    """Return C = max over rows h of Σ α h − ν D(h‖q), with ν = ``price``; α and q are (..., V).

    The result is an upper bound on C that exceeds C by no more than rounding.
    """
    inside = q > 0
    top = np.max(alpha, axis=-1, where=inside, initial=-np.inf)
    if price < SMALLEST_PRICE:
        return top
    if math.isinf(price):
        return np.sum(q * alpha, axis=-1, where=inside)
    rewards, rows = torch.from_numpy(np.where(inside, alpha, 0.0)), torch.from_numpy(q)
    # f is linear on both sides of 1 (total variation): the best h moves mass to the best token from
    # each token that is worth less by more than the move costs, ν (f′(∞) + f(0)) per unit
    if not f.smooth:
        kept_worth = top - price * (f.slope_at_infinity + f.at_zero)
        return np.sum(q * np.maximum(alpha, kept_worth[..., None]), axis=-1, where=inside)
    least = np.min(alpha, axis=-1, where=inside, initial=np.inf)
    level = _level(rewards, rows, f, price, *map(torch.from_numpy, (least, top)))
    # an upper bound at any level, tight at this level
    slope = (rewards - level[..., None]) / price
    terms = torch.where(torch.from_numpy(inside), rows * conjugate(f, slope), 0.0)
    return (level + price * terms.sum(-1)).numpy()


def _level(
    rewards: Tensor, q: Tensor, f: FDivergence, price: float, least: Tensor, top: Tensor
) -> Tensor:
    """Return λ, rounded up, with Σ q f′⁻¹((α − λ)/ν) = 1, where α are the rewards and ν the price.

    ``least`` and ``top`` are the smallest and the largest reward of each row.
    """

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
    """Return a proven upper bound on tokens − ν·divergence over all verifiers of one path.

    Parameters
    ----------
    tree : the rows by prefix.
    alpha : (nodes, V), multipliers of t ≤ g. They are clipped to [0, unit + C(ux) − ends], where
        C(ux) is the value of what follows the prefix ux; entries with q = 0 are not read, as no
        such token is emitted.
    f : the divergence.
    price : ν, tokens per unit of divergence.
    unit : value of an emitted token.
    ends : (nodes, V), additional value of ending a round with each recovered token.
    after : (V^K,), additional value of a bonus token after each fully accepted path.
    """
    # The module's formula if an emitted token earns w = ``unit`` instead of 1, a recovered token
    # e = ``ends`` more, and a bonus token ``after`` more:
    #   C = after from all K tokens on,   C(u) = max over h of Σ (e + α) h − ν D(h‖q_u),
    #   gained = (w + C(ux) − e)₊,   β = gained − α,   value ≤ w + C(root) + Σ p(ux) β.
    # A larger α than gained has β = 0, too, and only raises C, so α is clipped. ``below`` is C at
    # the level below, ``unpaid`` the sum over β.
    possible, unpaid = tree.possible, 0.0
    below = np.zeros(tree.vocabulary**tree.depth) if after is None else after
    end_worth = np.broadcast_to(ends, tree.target.shape)
    for level in reversed(tree.levels):
        q = tree.target[level]
        gained = np.maximum(unit + below.reshape(q.shape) - end_worth[level], 0.0)
        clipped = np.clip(alpha[level], 0.0, gained)
        # prefixes are numbered breadth first: ux has the number 1 + uV + x
        first = 1 + level.start * tree.vocabulary
        # p(ux); 0 where the target excludes a token of ux, since ux is then never accepted
        drafting = possible[first : first + q.size].reshape(q.shape)
        unpaid += float(np.sum(drafting * (gained - clipped)))
        below = worth(end_worth[level] + clipped, q, f, price)
    return unit + float(below[0]) + unpaid


def lossless_multipliers(tree: PathTree, alive: np.ndarray) -> np.ndarray:
    """Return multipliers α (nodes, V) that prove lossless block verification optimal for h = q.

    If x may be drafted after u and the prefix ux is not accepted for certain (``alive`` < 1), more
    mass on x gains the token x and the tokens that follow. Elsewhere more mass gains nothing.
    """
    alpha, below = np.zeros_like(tree.target), np.zeros(tree.vocabulary**tree.depth)
    for level in reversed(tree.levels):
        q = tree.target[level]
        first = 1 + level.start * tree.vocabulary  # the number of the level's first child
        ratio = alive[first : first + q.size].reshape(q.shape)
        drafted = (q > 0) & (tree.draft[level] > 0)
        alpha[level] = np.where(drafted & (ratio < 1), 1 + below.reshape(q.shape), 0.0)
        below = worth(alpha[level], q, KL(), math.inf)
    return alpha
