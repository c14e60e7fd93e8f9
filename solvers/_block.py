r"""The block program for a conic solver, on the part of the tree that can be reached.

Variables are of order one: w with g = p(u) s∘w at every node u (p(u) the probability of drafting
it), and the alive ratio P = t/p of every child that can be drafted. In them t ≤ g reads
(p/s) P ≤ w, t ≤ p(ux) reads P ≤ 1, Σ g = t reads s·w = P, and a node pays
p(u) Σ q P f(s w/(qP)).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.divergences import FDivergence

from . import _program
from ._dual import price_bound
from ._perspective import Terms, cvxpy, perspective, times
from ._program import FEASIBILITY, SMALLEST_SCALE, Attempted, Solver, unproven
from .paths import Followed, PathTree, follow

PRICE, PER_CALL, PER_TOKEN = "price", "per_call", "per_token"


@dataclass(frozen=True)
class Goal:
    """What is maximised: tokens − price·divergence, or tokens within a budget."""

    form: str
    amount: float

    def value(self, followed: Followed) -> float:
        if self.form != PRICE:
            return followed.tokens
        return followed.tokens - (self.amount * followed.divergence if self.amount else 0.0)

    def excess(self, followed: Followed) -> float:
        """Return by how much rows exceed the budget, −∞ where there is none."""
        if self.form == PRICE:
            return -math.inf
        unit = followed.tokens if self.form == PER_TOKEN else 1.0
        return followed.divergence - self.amount * unit

    def bound(self, tree: PathTree, alpha: np.ndarray, f: FDivergence, price: float) -> float:
        """Return a proven upper bound on the objective, from multipliers of the price form."""
        proven = price_bound(tree, alpha, f, price)
        paid = price * self.amount if price and self.form != PRICE else 0.0
        if self.form != PER_TOKEN:
            return proven + paid
        return proven / (1 - paid) if paid < 1 else math.inf


@dataclass(frozen=True)
class Layout:
    """The tokens that a program is about: those with q > 0 at nodes that can be reached.

    ``row`` and ``token`` (m,) are the node of each entry, and its token.
    """

    tree: PathTree
    row: np.ndarray
    token: np.ndarray

    @classmethod
    def of(cls, tree: PathTree) -> "Layout":
        reachable = tree.possible[: len(tree.target)] > 0
        return cls(tree, *np.nonzero(reachable[:, None] & (tree.target > 0)))

    @cached_property
    def q(self) -> np.ndarray:
        return self.tree.target[self.row, self.token]

    @cached_property
    def p(self) -> np.ndarray:
        return self.tree.draft[self.row, self.token]

    @cached_property
    def weight(self) -> np.ndarray:
        """Return (m,) the probability of drafting each entry's node."""
        return self.tree.possible[self.row]

    @cached_property
    def children(self) -> np.ndarray:
        """Return (n,) the entries that may be drafted; each has a prefix of its own."""
        return np.flatnonzero(self.weight * self.p > 0)

    @property
    def child_prefixes(self) -> np.ndarray:
        """Return (n,) the prefix of each child, its number in the tree."""
        return self.row[self.children] * self.tree.vocabulary + self.token[self.children] + 1

    @cached_property
    def alive_at(self) -> tuple[Any, np.ndarray]:
        """Return (matrix (m, n), vector (m,)): the alive ratio at each entry's node."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        count = len(self.children)
        child = np.full(len(self.tree.possible), -1)
        child[self.child_prefixes] = np.arange(count)
        inner = np.flatnonzero(self.row > 0)
        ones = (np.ones(len(inner)), (inner, child[self.row[inner]]))
        return sparse.csr_matrix(ones, (len(self.row), count)), (self.row == 0) * 1.0

    @cached_property
    def first(self) -> np.ndarray:
        """Return the first entry of each node that has entries."""
        return np.flatnonzero(np.diff(self.row, prepend=-1))

    @cached_property
    def sums(self) -> Any:
        """Return the matrix (nodes with entries, m) that adds the entries of a node."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        node = np.cumsum(np.diff(self.row, prepend=-1) > 0) - 1
        return sparse.csr_matrix((np.ones(len(node)), (node, np.arange(len(node)))))

    def spread(self, entries: np.ndarray) -> np.ndarray:
        """Return entries (m,) as rows (nodes, V), 0 elsewhere."""
        rows = np.zeros_like(self.tree.target)
        rows[self.row, self.token] = entries
        return rows

    def normalised(self, raw: np.ndarray) -> np.ndarray:
        """Return g (m,) as rows (nodes, V) that sum to 1; q where a node has no mass."""
        rows = self.spread(np.maximum(raw, 0.0))
        mass = rows.sum(-1, keepdims=True)
        return np.where(mass > 0, rows / np.where(mass > 0, mass, 1.0), self.tree.target)


@dataclass(frozen=True)
class Answer:
    """A checked answer: h and α (nodes, V), what h comes to, ν, the bound, and labels."""

    target: np.ndarray
    alpha: np.ndarray
    followed: Followed
    price: float
    bound: float
    solver: str
    status: str


@dataclass(frozen=True)
class Program(Attempted[Answer]):
    """The program of a goal on a tree, given an f-divergence."""

    layout: Layout
    f: FDivergence
    goal: Goal

    promise = f"the rows must keep their budget within {FEASIBILITY:g} and meet their dual bound"

    @property
    def linear(self) -> bool:
        return self.f.linear

    @property
    def guess(self) -> np.ndarray:
        """Return a positive guess of h: the draft, kept between q and what a price can pay for.

        One unit of mass is worth 1 + K at most, so that ν f′(h/q) rises by no more than that.
        """
        q, p = self.layout.q, self.layout.p
        if self.goal.form != PRICE or not self.f.smooth:
            return np.sqrt(q * np.maximum(p, q))
        step = (self.layout.tree.depth + 1) / self.goal.amount
        slope = torch.tensor(self.f.slope_at_one + step, dtype=torch.float64)
        return np.clip(p, q, q * float(self.f.ratio_at(slope)))

    def attempt(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        built = self._built(scale)
        if not _program.believable(built.problem, *solver) or built.emission.dual_value is None:
            return None
        alpha, price = self._multipliers(scale, built)
        target = self.layout.normalised(scale * built.w.value)
        followed = follow(self.layout.tree, target, self.f)
        bound = self.goal.bound(self.layout.tree, alpha, self.f, price)
        return Answer(target, alpha, followed, price, bound, solver[0], built.problem.status)

    def fault(self, answer: Answer) -> str | None:
        excess = self.goal.excess(answer.followed)
        if not excess <= FEASIBILITY:
            return f"{answer.status}, but the budget is exceeded by {excess:.3g}"
        return unproven(answer.status, self.goal.value(answer.followed), answer.bound)

    def rescaled(self, answer: Answer | None, scale: np.ndarray) -> np.ndarray:
        q, row, token = self.layout.q, self.layout.row, self.layout.token
        if answer is None:
            return q
        size = answer.followed.alive[row] * answer.target[row, token]
        return np.maximum(size, SMALLEST_SCALE * q)

    def _built(self, scale: np.ndarray) -> "_Built":
        cp, layout, goal, children = cvxpy(), self.layout, self.goal, self.layout.children
        w, kept = cp.Variable(len(scale), nonneg=True), cp.Variable(len(children), nonneg=True)
        matrix, root = layout.alive_at
        terms = Terms(w, matrix @ kept + root, scale / layout.q)
        spent = (layout.weight * layout.q) @ perspective(terms, self.f)
        emission = times(layout.p[children] / scale[children], kept) <= w[children]
        whole = layout.sums @ times(scale, w) == terms.alive[layout.first]
        limits = [emission, kept <= 1, whole, *terms.constraints]
        tokens = 1 + (layout.weight * layout.p)[children] @ kept
        if goal.form == PRICE:
            problem = cp.Problem(cp.Maximize(tokens - goal.amount * spent), limits)
            return _Built(problem, w, emission, None)
        budget = spent <= goal.amount * (tokens if goal.form == PER_TOKEN else 1)
        return _Built(cp.Problem(cp.Maximize(tokens), [*limits, budget]), w, emission, budget)

    def _multipliers(self, scale: np.ndarray, built: "_Built") -> tuple[np.ndarray, float]:
        """Return α (nodes, V) and ν of the price form.

        Tokens enter a budget per token as well: with its multiplier y one of them counts 1 + yκ.
        """
        children, alpha = self.layout.children, np.zeros(len(scale))
        price, unit = self.goal.amount, 1.0
        if built.budget is not None:
            price = max(0.0, float(np.sum(built.budget.dual_value)))
        if self.goal.form == PER_TOKEN:
            unit = 1 + price * self.goal.amount
        worth = unit * self.layout.weight[children] * scale[children]
        alpha[children] = built.emission.dual_value / worth
        return self.layout.spread(alpha), price / unit


@dataclass(frozen=True)
class _Built:
    """A program in one scaling: its variable w, the constraints t ≤ g, and the budget's if any."""

    problem: Any
    w: Any
    emission: Any
    budget: Any | None
