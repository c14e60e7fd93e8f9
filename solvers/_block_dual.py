r"""Bound the block program from above at any multipliers, and price what a node may do.

With a multiplier α ≥ 0 of t ≤ g for every node u and token x, and ν the price of divergence,
weak duality gives for the price form, from the leaves (C = 0) to the root,

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
Source: Boyd & Vandenberghe 2004, 5.1; theory of the one node: Csiszár 1967.
"""

import math

import numpy as np
import torch
from torch import Tensor

from cactus_theory.divergences import KL, FDivergence

from .paths import PathTree

# the bracket of a level shrinks below an ulp of it
HALVINGS = 60
# below this, (α − λ)/ν may overflow; a price of 0 then bounds the node as well
SMALLEST_PRICE = 1e-150


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
    return worth_at(alpha, q, f, price, level.numpy())


def worth_at(
    alpha: np.ndarray, q: np.ndarray, f: FDivergence, price: float, level: np.ndarray
) -> np.ndarray:
    """Return the bound on C at levels λ (...), valid at any of them and tight at the right one."""
    inside = torch.from_numpy(q > 0)
    slope = torch.from_numpy((np.where(q > 0, alpha, 0.0) - level[..., None]) / price)
    terms = torch.where(inside, torch.from_numpy(q * 1.0) * conjugate(f, slope), 0.0)
    return level + price * terms.sum(-1).numpy()


def _level(
    rewards: Tensor, q: Tensor, f: FDivergence, price: float, least: Tensor, top: Tensor
) -> Tensor:
    """Return the level where Σ q f′⁻¹((α − λ)/ν) falls to 1, its upper end."""
    low, high = least - price * f.slope_at_one, top - price * f.slope_at_one
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        ratio = f.ratio_at((rewards - middle[..., None]) / price)
        heavy = torch.where(q > 0, q * ratio, 0.0).sum(-1) > 1
        low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    return high


def price_bound(tree: PathTree, alpha: np.ndarray, f: FDivergence, price: float) -> float:
    """Return a proven upper bound on tokens − ν·divergence of every verifier.

    Parameters
    ----------
    alpha : (nodes, V) multipliers of t ≤ g; negative ones count as 0, and ones above what the
        prefix is worth as that. Entries with q = 0 are not read: nothing is emitted there.
    """
    possible, below, paid = tree.possible, np.zeros(tree.vocabulary**tree.depth), 0.0
    for level in reversed(tree.levels):
        q = tree.target[level]
        ahead = 1 + below.reshape(q.shape)
        own = np.clip(alpha[level], 0.0, ahead)
        first = 1 + level.start * tree.vocabulary
        chance = possible[first : first + q.size].reshape(q.shape)
        paid += float(np.sum(chance * (ahead - own)))
        below = worth(own, q, f, price)
    return 1 + float(below[0]) + paid


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
        taken = (q > 0) & (tree.draft[level] > 0)
        alpha[level] = np.where(taken & (ratio < 1), 1 + below.reshape(q.shape), 0.0)
        below = worth(alpha[level], q, KL(), math.inf)
    return alpha


def per_call_bound(bound: float, price: float, budget: float) -> float:
    """Return the bound on tokens with divergence ≤ budget, from that of the price form."""
    return bound + (price * budget if price else 0.0)


def per_token_bound(bound: float, price: float, budget: float) -> float:
    """Return the bound on tokens with divergence ≤ budget·tokens; ∞ if the price proves none."""
    left = 1 - price * budget
    return bound / left if left > 0 else math.inf
