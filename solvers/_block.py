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

from cactus_theory import _arguments as check
from cactus_theory.divergences import FDivergence

from . import _program
from ._block_dual import per_call_bound, per_token_bound, price_bound
from ._perspective import Terms, perspective
from ._program import FEASIBILITY, OPTIMALITY, SMALLEST_SCALE, SolverGaveUp
from ._scaled import cvxpy, times
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


def solve(tree: PathTree, f: FDivergence, goal: Goal) -> Answer:
    """Return the first answer that keeps its budget within 1e-7 and meets its bound within 1e-6.

    Raises
    ------
    SolverGaveUp
        No attempt passed its own check.
    ModuleNotFoundError
        cvxpy is missing.
    """
    layout, faults = Layout.of(tree), []
    scale = _guess(layout, f, goal)
    for how in _program.attempts(f.linear):
        answer = _attempt(layout, scale, f, goal, how)
        fault = _fault(answer, goal)
        if answer is not None and fault is None:
            return answer
        faults.append(f"{how[0]}: {fault}")
        scale = layout.q if answer is None else _sizes(layout, answer)
    raise SolverGaveUp(
        f"solver: the rows must keep their budget within {FEASIBILITY:g} and meet their dual "
        f"bound within {OPTIMALITY:g}; got {'; '.join(faults)}"
    )


def _guess(layout: Layout, f: FDivergence, goal: Goal) -> np.ndarray:
    """Return a positive guess of h: the draft, kept between q and what a price can pay for.

    One unit of mass is worth 1 + K at most, so that ν f′(h/q) rises by no more than that.
    """
    if goal.form != PRICE or not f.smooth:
        return np.sqrt(layout.q * np.maximum(layout.p, layout.q))
    step = (layout.tree.depth + 1) / goal.amount
    ratio = float(f.ratio_at(torch.tensor(f.slope_at_one + step, dtype=torch.float64)))
    return np.clip(layout.p, layout.q, layout.q * ratio)


def _sizes(layout: Layout, answer: Answer) -> np.ndarray:
    """Return the size of g at an answer, to scale the next attempt."""
    given = answer.found.alive[layout.row] * answer.target[layout.row, layout.token]
    return np.maximum(given, SMALLEST_SCALE * layout.q)


@dataclass(frozen=True)
class _Built:
    """A program in one scaling: its variable w, the constraints t ≤ g, and the budget's if any."""

    problem: Any
    w: Any
    given: Any
    budget: Any | None


def _build(layout: Layout, scale: np.ndarray, f: FDivergence, goal: Goal) -> _Built:
    cp, at = cvxpy(), layout.children
    w, kept = cp.Variable(len(scale), nonneg=True), cp.Variable(len(at), nonneg=True)
    matrix, root = layout.alive_at
    alive = matrix @ kept + root
    spent, held = _spent(layout, scale, w, alive, f)
    given = times(layout.p[at] / scale[at], kept) <= w[at]
    whole = layout.sums @ times(scale, w) == alive[layout.first]
    limits = [given, kept <= 1, whole, *held]
    tokens = 1 + (layout.weight * layout.p)[at] @ kept
    if goal.form == PRICE:
        problem = cp.Problem(cp.Maximize(tokens - goal.amount * spent), limits)
        return _Built(problem, w, given, None)
    budget = spent <= goal.amount * (tokens if goal.form == PER_TOKEN else 1)
    return _Built(cp.Problem(cp.Maximize(tokens), [*limits, budget]), w, given, budget)


def _attempt(
    layout: Layout, scale: np.ndarray, f: FDivergence, goal: Goal, how: tuple[str, dict]
) -> Answer | None:
    """Return one solver's cleaned answer with its bound, or None if it has none."""
    built = _build(layout, scale, f, goal)
    if not _program.believable(built.problem, *how) or built.given.dual_value is None:
        return None
    alpha, price = _multipliers(layout, scale, built, goal)
    target = _cleaned(layout, scale * built.w.value)
    found = follow(layout.tree, target, f)
    bound = goal.bound(layout.tree, alpha, f, price)
    return Answer(target, alpha, found, price, bound, how[0], built.problem.status)


def _multipliers(
    layout: Layout, scale: np.ndarray, built: _Built, goal: Goal
) -> tuple[np.ndarray, float]:
    """Return α (nodes, V) and ν of the price form.

    Tokens enter a budget per token as well: with its multiplier y one of them counts 1 + yκ.
    """
    at, alpha = layout.children, np.zeros(len(scale))
    price, unit = goal.amount, 1.0
    if built.budget is not None:
        price = max(0.0, float(np.sum(built.budget.dual_value)))
    if goal.form == PER_TOKEN:
        unit = 1 + price * goal.amount
    alpha[at] = built.given.dual_value / (unit * layout.weight[at] * scale[at])
    return layout.spread(alpha), price / unit


def _spent(
    layout: Layout, scale: np.ndarray, w: Any, alive: Any, f: FDivergence
) -> tuple[Any, list[Any]]:
    """Return the divergence metered per call, and the constraints it comes with."""
    terms = Terms(w, alive, scale / layout.q)
    each = perspective(terms, f)
    return (layout.weight * layout.q) @ each, terms.constraints


def _cleaned(layout: Layout, raw: np.ndarray) -> np.ndarray:
    """Return rows (nodes, V) that sum to 1, in proportion to g; q where a node is not reached."""
    rows = layout.spread(np.maximum(raw, 0.0))
    mass = rows.sum(-1, keepdims=True)
    return np.where(mass > 0, rows / np.where(mass > 0, mass, 1.0), layout.tree.target)


def _fault(answer: Answer | None, goal: Goal) -> str | None:
    """Return why an answer is not accepted."""
    if answer is None:
        return "no answer"
    value = goal.value(answer.found)
    if not goal.excess(answer.found) <= FEASIBILITY:
        return f"{answer.status}, but the budget is exceeded by {goal.excess(answer.found):.3g}"
    if not abs(answer.bound - value) <= OPTIMALITY:
        return f"{answer.status}, but {value:.9g} misses its bound {answer.bound:.9g}"
    return None
