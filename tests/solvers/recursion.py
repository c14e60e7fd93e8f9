r"""The value of a drafted prefix by recursion, without a solver: what confirms the block program.

With P the alive ratio of a prefix u and F(u, P) the most that can follow it,

.. math:: F(u, P) = \max_{Σ g = P} Σ_x p_x φ_x(g_x/p_x) − ν D(g\|P q), \qquad
   φ_x(r) = \min(1, r) + F(ux, \min(1, r)), \qquad F = 0 \text{ after K tokens}

F is concave in P with F(u, 0) = 0, and 1 + F(root, 1) is the optimum at the price ν. On a grid of
P it is bracketed: between grid points a chord lies below F, and every choice of multipliers α
gives a line above it for all P,

.. math:: F(u, P) \le C(α) P + Σ_x p_x φ_x^*(α_x), \qquad
   φ^*(α) = \sup_{0 \le r \le 1} r + F(ux, r) − α r

(C as in :mod:`solvers._dual`). Both brackets close with the square of the grid's step. The
row at a node solves φ′_x(g_x/p_x) − ν f′(g_x/(P q_x)) = μ for every token: a band whose edges
are soft. On the φ of chords this is exact, one segment after the other
(THEORY.md, Theorem 13).
"""

from dataclasses import dataclass

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence
from solvers._dual import worth_at
from solvers._program import additive
from solvers.paths import Followed, PathTree, check_count, follow

# the bracket of μ shrinks to 2^-60 of a value of a few tokens: rounding
HALVINGS = 60


@dataclass(frozen=True)
class BlockValues:
    """The value recursion of a tree at a price.

    Attributes
    ----------
    grid : (points + 1,) alive ratios from 0 to 1.
    lower, upper : (nodes, points + 1) proven bounds on F of each prefix.
    target : (nodes, V) the rows h along the recursion's own policy, from P = 1 at the root.
    followed : what they come to, exactly.
    value : their tokens − ν·divergence, a lower bound on the optimum better than the chords'.
    bound : upper bound on the optimum, 1 + F(root, 1).
    """

    grid: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    target: np.ndarray
    followed: Followed
    value: float
    bound: float


@dataclass(frozen=True)
class _Choice:
    """The best rows of nodes at some alive ratios: g/(P q) (n, points, V) and μ (n, points)."""

    ratio: np.ndarray
    level: np.ndarray


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth: rows (n, V), φ's values (n, V, m + 1) on ``knots`` (m + 1,)."""

    q: np.ndarray
    p: np.ndarray
    knots: np.ndarray
    phi: np.ndarray
    f: FDivergence
    price: float

    @property
    def slopes(self) -> np.ndarray:
        """Return φ′ of each segment, and 0 beyond 1; (n, V, m + 1). Nothing where p = 0."""
        inside = np.diff(self.phi) / np.diff(self.knots)
        padded = np.concatenate([inside, np.zeros_like(inside[..., :1])], -1)
        # rounding may bend a chord upwards
        return np.where(self.p[..., None] > 0, np.minimum.accumulate(padded, -1), 0.0)

    def choose(self, alive: np.ndarray) -> _Choice:
        """Return the best rows at alive ratios (n, points) > 0."""
        slopes = self.slopes
        least, most = -self.price * self.f.slope_at_one, slopes[..., 0].max(-1)
        low = np.full(alive.shape, least)
        high = low + most[:, None]
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            heavy = (self.q[:, None] * self._ratio(slopes, alive, middle)).sum(-1) > 1
            low, high = np.where(heavy, middle, low), np.where(heavy, high, middle)
        ratio = self._ratio(slopes, alive, high)
        mass = (self.q[:, None] * ratio).sum(-1, keepdims=True)
        return _Choice(np.where(mass > 0, ratio / np.where(mass > 0, mass, 1.0), 1.0), high)

    def _ratio(self, slopes: np.ndarray, alive: np.ndarray, level: np.ndarray) -> np.ndarray:
        """Return the g/(P q) with φ′ − ν f′ = μ: the segment is found by halving."""
        unit = self._unit(alive)
        low = np.zeros(unit.shape, dtype=np.int64)
        high = np.full(unit.shape, len(self.knots) - 1)
        wide = np.broadcast_to(slopes[:, None], (*unit.shape, slopes.shape[-1]))
        for _ in range(len(self.knots).bit_length()):
            middle = np.minimum((low + high) // 2, len(self.knots) - 2)
            slope = np.take_along_axis(wide, middle[..., None], -1)[..., 0]
            key = slope - self.price * self._f_slope(self.knots[middle + 1] * unit)
            beyond = (key >= level[..., None]) & (low < high)
            low, high = np.where(beyond, middle + 1, low), np.where(beyond, high, middle)
        rise = np.take_along_axis(wide, low[..., None], -1)[..., 0]
        free = self.f.ratio_at(torch.from_numpy((rise - level[..., None]) / self.price)).numpy()
        top = np.append(self.knots[1:], np.inf)[low]
        with np.errstate(invalid="ignore"):
            ceiling = np.where(np.isinf(top), np.inf, top * unit)
        return np.where(self.q[:, None] > 0, np.clip(free, self.knots[low] * unit, ceiling), 0.0)

    def _unit(self, alive: np.ndarray) -> np.ndarray:
        """Return p/(P q), the g/(P q) at which a token is accepted for certain; 0 at q = 0."""
        mass = alive[..., None] * self.q[:, None]
        return np.divide(self.p[:, None], mass, out=np.zeros_like(mass), where=mass > 0)

    def _f_slope(self, ratio: np.ndarray) -> np.ndarray:
        return self.f.slope(torch.from_numpy(ratio)).numpy()

    def lower(self, alive: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """Return Σ p φ − ν P D of rows at alive ratios (n, points), exactly on the chords."""
        unit = self._unit(alive)
        reached = np.divide(ratio, unit, out=np.zeros_like(ratio), where=unit > 0)
        place = np.minimum(reached, 1.0) * (len(self.knots) - 1)
        at = np.minimum(place.astype(np.int64), len(self.knots) - 2)
        phi = np.broadcast_to(self.phi[:, None], (*at.shape, self.phi.shape[-1]))
        ends = [np.take_along_axis(phi, (at + step)[..., None], -1)[..., 0] for step in (0, 1)]
        kept = self.p[:, None] * (ends[0] + (place - at) * (ends[1] - ends[0]))
        rows = np.broadcast_to(self.q[:, None], ratio.shape)
        spent = self.f.value(torch.from_numpy(rows * ratio), torch.from_numpy(rows.copy()))
        return kept.sum(-1) - self.price * alive * spent.numpy()

    def multipliers(self, choice: _Choice) -> np.ndarray:
        """Return α (n, points, V), the worth of mass on each token at a choice."""
        with np.errstate(divide="ignore"):
            alpha = choice.level[..., None] + self.price * self._f_slope(choice.ratio)
        return np.clip(np.nan_to_num(alpha), 0.0, self.slopes[:, None, :, 0])


@dataclass(frozen=True)
class _Above:
    """F from above for nodes of one depth: values at breakpoints (n, m), straight between."""

    at: np.ndarray
    value: np.ndarray

    @classmethod
    def of_lines(cls, alive: np.ndarray, slope: np.ndarray, start: np.ndarray) -> "_Above":
        """Return the least of lines that touch F at rising ``alive`` (points,)."""
        fall, rise = slope[:, :-1] - slope[:, 1:], start[:, 1:] - start[:, :-1]
        cross = np.divide(rise, fall, out=np.zeros_like(rise), where=fall > 0)
        cross = np.clip(cross, alive[:-1], alive[1:])
        ends = np.zeros((len(slope), 1)), np.ones((len(slope), 1))
        at = np.concatenate([ends[0], cross, ends[1]], -1)
        left = slope[:, [0, *range(slope.shape[1])]] * at + start[:, [0, *range(slope.shape[1])]]
        line = [*range(slope.shape[1]), slope.shape[1] - 1]
        return cls(at, np.maximum(left, slope[:, line] * at + start[:, line]))

    def conjugate(self, node: int, alpha: np.ndarray) -> np.ndarray:
        """Return φ*(α) = sup over r in [0, 1] of r + F − α r of one node, for α (points,)."""
        at, value = self.at[node], self.value[node]
        return (at + value - alpha[:, None] * at).max(-1)


def solve(
    tree: PathTree, divergence: str | Divergence = "kl", *, price: float, points: int = 200
) -> BlockValues:
    """Bracket the optimum at a price by the value recursion, and follow its policy.

    Independent of any solver: numpy and torch alone. Where 200 points leave a bracket of 3e-5,
    ``points`` = 2,000 leave 5e-7; time grows with points² on inner nodes.

    Parameters
    ----------
    tree : the rows by prefix.
    divergence : a smooth f-divergence.
    price : ν, positive and finite.
    points : steps of the grid of alive ratios.

    Raises
    ------
    ValueError
        A divergence without a smooth generator, a price of 0 or ∞, no points.
    """
    kind = additive(divergence)
    if not kind.smooth:
        raise ValueError(f"divergence: must have a smooth generator here; got {kind.spec!r}")
    price = check.number("price", price, 0.0, np.finfo(np.float64).max, open_low=True)
    alive = np.arange(1, check_count("points", points) + 1) / points
    shape = (len(tree.target), points + 1)
    lower, upper, kept = np.zeros(shape), np.zeros(shape), []
    above: _Above | None = None
    for depth in reversed(range(tree.depth)):
        level = _level(tree, depth, lower, kind, price)
        kept.insert(0, level)
        grid = np.broadcast_to(alive, (len(level.q), points))
        choice = level.choose(grid)
        nodes = tree.levels[depth]
        lower[nodes, 1:] = level.lower(grid, choice.ratio)
        above = _lines(level, choice, above, alive)
        for row, (at, value) in enumerate(zip(above.at, above.value, strict=True), nodes.start):
            upper[row] = np.interp(np.append(0.0, alive), at, value)
    target = _policy(tree, kept)
    followed = follow(tree, target, kind)
    value = followed.tokens - price * followed.divergence
    steps = np.append(0.0, alive)
    return BlockValues(steps, lower, upper, target, followed, value, 1 + float(upper[0, -1]))


def _level(tree: PathTree, depth: int, lower: np.ndarray, f: FDivergence, price: float) -> _Level:
    """Return the nodes of one depth, with φ from what is known of the depth below."""
    nodes = tree.levels[depth]
    q, p = tree.target[nodes], tree.draft[nodes]
    if depth + 1 == tree.depth:
        knots = np.array([0.0, 1.0])
        return _Level(q, p, knots, np.broadcast_to(knots, (*q.shape, 2)), f, price)
    knots = np.linspace(0.0, 1.0, lower.shape[1])
    below = lower[tree.levels[depth + 1]].reshape(*q.shape, -1)
    return _Level(q, p, knots, knots + below, f, price)


def _lines(level: _Level, choice: _Choice, below: _Above | None, alive: np.ndarray) -> _Above:
    """Return F from above: one line for the multipliers of each choice."""
    alpha = level.multipliers(choice)
    rows = np.broadcast_to(level.q[:, None], alpha.shape)
    slope = worth_at(alpha, rows, level.f, level.price, choice.level)
    start = np.zeros_like(slope)
    for node, token in zip(*np.nonzero((level.p > 0) & (level.q > 0)), strict=True):
        rewards = alpha[node, :, token]
        if below is None:
            best = np.maximum(0.0, 1 - rewards)
        else:
            best = below.conjugate(node * level.q.shape[1] + token, rewards)
        start[node] += level.p[node, token] * best
    return _Above.of_lines(alive, slope, start)


def _policy(tree: PathTree, levels: list[_Level]) -> np.ndarray:
    """Return the rows (nodes, V) of the best choices from P = 1 on; q where P = 0."""
    rows, alive = [], np.ones((1, 1))
    for level in levels:
        choice = level.choose(np.where(alive > 0, alive, 1.0))
        h = level.q * np.where(alive > 0, choice.ratio[:, 0], 1.0)
        rows.append(h / h.sum(-1, keepdims=True))
        ratio = np.divide(alive * h, level.p, out=np.zeros_like(h), where=level.p > 0)
        alive = np.minimum(ratio, 1.0).reshape(-1, 1)
    return np.concatenate(rows)
