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
from ._dual import per_call_bound, per_token_bound, price_bound
from ._perspective import Terms, cvxpy, perspective, times
from ._program import FEASIBILITY, SMALLEST_SCALE, Attempted, unproven
from .paths import Followed, PathTree, follow

PRICE, PER_CALL, PER_TOKEN = "price", "per_call", "per_token"


@dataclass(frozen=True)
class Goal:
    """What is maximised: tokens − price·divergence, or tokens within a budget."""

    form: str
    amount: float

    def value(self, found: Followed) -> float:
        """Return the objective of a policy that was followed."""
        if self.form != PRICE:
            return found.tokens
        return found.tokens - (self.amount * found.divergence if self.amount else 0.0)

    def excess(self, found: Followed) -> float:
        """Return by how much a policy exceeds the budget, −∞ where there is none."""
        if self.form == PRICE:
            return -math.inf
        unit = found.tokens if self.form == PER_TOKEN else 1.0
        return found.divergence - self.amount * unit

    def bound(self, tree: PathTree, alpha: np.ndarray, f: FDivergence, price: float) -> float:
        """Return a proven upper bound on the objective, from multipliers of the price form."""
        proven = price_bound(tree, alpha, f, price)
        if self.form == PER_CALL:
            return per_call_bound(proven, price, self.amount)
        return proven if self.form == PRICE else per_token_bound(proven, price, self.amount)


@dataclass(frozen=True)
class Layout:
    """The tokens that a program is about: those with q > 0 at nodes that can be reached.

    Attributes
    ----------
    row, token : (m,) the node of each entry, and its token.
    """

    tree: PathTree
    row: np.ndarray
    token: np.ndarray

    @classmethod
    def of(cls, tree: PathTree) -> "Layout":
        """Return the layout of a tree."""
        live = tree.possible[: len(tree.target)] > 0
        return cls(tree, *np.nonzero(live[:, None] & (tree.target > 0)))

    @cached_property
    def q(self) -> np.ndarray:
        """Return (m,) the target's probabilities."""
        return self.tree.target[self.row, self.token]

    @cached_property
    def p(self) -> np.ndarray:
        """Return (m,) the draft's."""
        return self.tree.draft[self.row, self.token]

    @cached_property
    def weight(self) -> np.ndarray:
        """Return (m,) the probability of drafting each entry's node."""
        return self.tree.possible[self.row]

    @cached_property
    def children(self) -> np.ndarray:
        """Return (n,) the entries that may be drafted; each has a prefix of its own."""
        return np.flatnonzero(self.weight * self.p > 0)

    @cached_property
    def alive_at(self) -> tuple[Any, np.ndarray]:
        """Return (matrix (m, n), vector (m,)): the alive ratio at each entry's node."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        at = self.children
        prefix = self.row[at] * self.tree.vocabulary + self.token[at] + 1
        place = np.full(len(self.tree.possible), -1)
        place[prefix] = np.arange(len(at))
        inner = np.flatnonzero(self.row > 0)
        ones = (np.ones(len(inner)), (inner, place[self.row[inner]]))
        return sparse.csr_matrix(ones, (len(self.row), len(at))), (self.row == 0) * 1.0

    @cached_property
    def first(self) -> np.ndarray:
        """Return the first entry of each node that has entries."""
        return np.flatnonzero(np.diff(self.row, prepend=-1))

    @cached_property
    def sums(self) -> Any:
        """Return the matrix (nodes with entries, m) that adds the entries of a node."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        own = np.cumsum(np.diff(self.row, prepend=-1) > 0) - 1
        return sparse.csr_matrix((np.ones(len(own)), (own, np.arange(len(own)))))

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
    found: Followed
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

    def attempt(self, scale: np.ndarray, how: tuple[str, dict]) -> Answer | None:
        built = self._built(scale)
        if not _program.believable(built.problem, *how) or built.given.dual_value is None:
            return None
        alpha, price = self._multipliers(scale, built)
        target = self.layout.normalised(scale * built.w.value)
        found = follow(self.layout.tree, target, self.f)
        bound = self.goal.bound(self.layout.tree, alpha, self.f, price)
        return Answer(target, alpha, found, price, bound, how[0], built.problem.status)

    def fault(self, found: Answer) -> str | None:
        excess = self.goal.excess(found.found)
        if not excess <= FEASIBILITY:
            return f"{found.status}, but the budget is exceeded by {excess:.3g}"
        return unproven(found.status, self.goal.value(found.found), found.bound)

    def rescaled(self, found: Answer | None, scale: np.ndarray) -> np.ndarray:
        """Return the size of g at an answer, or q if there was none."""
        q, row, token = self.layout.q, self.layout.row, self.layout.token
        if found is None:
            return q
        return np.maximum(found.found.alive[row] * found.target[row, token], SMALLEST_SCALE * q)

    def _built(self, scale: np.ndarray) -> "_Built":
        cp, layout, goal, at = cvxpy(), self.layout, self.goal, self.layout.children
        w, kept = cp.Variable(len(scale), nonneg=True), cp.Variable(len(at), nonneg=True)
        matrix, root = layout.alive_at
        terms = Terms(w, matrix @ kept + root, scale / layout.q)
        spent = (layout.weight * layout.q) @ perspective(terms, self.f)
        given = times(layout.p[at] / scale[at], kept) <= w[at]
        whole = layout.sums @ times(scale, w) == terms.alive[layout.first]
        limits = [given, kept <= 1, whole, *terms.constraints]
        tokens = 1 + (layout.weight * layout.p)[at] @ kept
        if goal.form == PRICE:
            problem = cp.Problem(cp.Maximize(tokens - goal.amount * spent), limits)
            return _Built(problem, w, given, None)
        budget = spent <= goal.amount * (tokens if goal.form == PER_TOKEN else 1)
        return _Built(cp.Problem(cp.Maximize(tokens), [*limits, budget]), w, given, budget)

    def _multipliers(self, scale: np.ndarray, built: "_Built") -> tuple[np.ndarray, float]:
        """Return α (nodes, V) and ν of the price form.

        Tokens enter a budget per token as well: with its multiplier y one of them counts 1 + yκ.
        """
        at, alpha = self.layout.children, np.zeros(len(scale))
        price, unit = self.goal.amount, 1.0
        if built.budget is not None:
            price = max(0.0, float(np.sum(built.budget.dual_value)))
        if self.goal.form == PER_TOKEN:
            unit = 1 + price * self.goal.amount
        alpha[at] = built.given.dual_value / (unit * self.layout.weight[at] * scale[at])
        return self.layout.spread(alpha), price / unit


@dataclass(frozen=True)
class _Built:
    """A program in one scaling: its variable w, the constraints t ≤ g, and the budget's if any."""

    problem: Any
    w: Any
    given: Any
    budget: Any | None
