r"""The block program: the best lossy verification of one drafted path, by any verifier.

.. math:: \max_{g, t} \; 1 + Σ t(ux) − ν Σ_u D(g_u\|t(u) q_u) \;\text{ s.t. }\;
   t(ux) \le g(u, x),\; t(ux) \le p(ux),\; Σ_x g(u, x) = t(u),\; t(\text{root}) = 1

over all prefixes u of fewer than K drafted tokens and all tokens x. p(ux) is the probability of
drafting ux, t(ux) the probability of drafting and accepting ux, and g(u, x) the probability of
emitting x after u. Every verifier of one path satisfies these constraints, whatever random numbers
and rows it uses. Block verification with h = g/t in place of q attains the largest t that the
constraints allow (Sun et al. 2024, arXiv 2403.10444). So the value of the program is the optimum
over all verifiers, and h attains it. Divergence is metered as D(h‖q) at every reached node; a bonus
token costs nothing. Source: THEORY.md, Theorem 13.
"""

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence

from . import _attempts
from ._dual_bounds import halved, lossless_multipliers, price_bound
from ._perspective import cvxpy
from ._tree_program import Flow, Layout, TreeProgram
from .path_tree import Followed, PathTree, follow

# halvings of the bracket [0, 1] of a row's lower edge, to below rounding
HALVINGS = 60
PRICE, PER_TOKEN = "price", "per_token"


@dataclass(frozen=True)
class BlockProgram:
    """The solution of the block program, with rows and prefixes in the tree's order.

    ``price`` is the given price, or the ν at which maximising tokens − ν·divergence has the same
    optimum as the budget: ∞ if nothing may be spent, 0 if all tokens with q > 0 are accepted.
    """

    tokens: float  # per target call, the recovered or bonus token included
    divergence: float  # metered per call, in the divergence's unit (nats for KL)
    per_token: float  # metered per emitted token
    lossless: float  # tokens per call of lossless block verification, for comparison
    value: float  # the objective: tokens − price·divergence, or tokens within a budget
    price: float
    bound: float  # proven upper bound on the value
    gap: float  # bound minus value
    target: np.ndarray  # (nodes, V) h, the row to verify against; q at nodes that are not reached
    alive: np.ndarray  # (nodes + V^K,) the probability of accepting a prefix if drafted, t/p
    reached: np.ndarray  # (nodes + V^K,) t
    multipliers: np.ndarray  # (nodes, V) of t ≤ g: the worth of mass on a token, at the price
    solver: str  # the solver; ``identity`` if none was needed
    status: str  # the solver's status
    seconds: float  # wall time, building the program included


def solve(
    tree: PathTree,
    divergence: str | Divergence = "kl",
    *,
    price: float | None = None,
    per_token: float | None = None,
) -> BlockProgram:
    r"""Maximise tokens per target call at a price or within a budget of metered divergence.

    Every answer is checked. The solver's rows are clipped, divided by their sums, and followed
    through the tree exactly, so ``tokens``, ``divergence`` and ``value`` are the exact results of
    verifying with ``target`` in place of q. The value must be within 1e-6 of an upper bound that
    holds at any multipliers (:mod:`solvers._dual_bounds`), and a budget is kept within 1e-7. Tokens
    with q = 0 are never emitted; prefixes with p = 0 have no variables.

    Parameters
    ----------
    tree : the rows by prefix; about a hundred rows take a second.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    price : ν ≥ 0, tokens given up for a unit of divergence; ∞ is lossless.
    per_token : budget κ ≥ 0 on the metered divergence per emitted token.
        Exactly one of ``price`` and ``per_token`` must be given.

    Raises
    ------
    ValueError
        Not exactly one of ``price`` and ``per_token``, a negative amount, or a Rényi or
        max-divergence, whose sum over nodes is not convex in g and t.
    TypeError
        Not a PathTree.
    SolverGaveUp, ModuleNotFoundError
        No answer passed the check (a RuntimeError); cvxpy is missing.
    """
    started = time.perf_counter()
    if not isinstance(tree, PathTree):
        raise TypeError(f"tree: must be a PathTree; got {type(tree).__name__}")
    kind = _attempts.additive(divergence)
    goal = _goal(price=price, per_token=per_token)
    program = Program(tree, kind, goal)
    answer = _without_solver(tree, kind, goal) or program.solve(program.guess)
    followed = answer.followed
    return BlockProgram(
        tokens=followed.tokens,
        divergence=followed.divergence,
        per_token=followed.per_token,
        lossless=follow(tree, tree.target, kind).tokens,
        value=answer.value,
        price=answer.price,
        target=answer.target,
        alive=followed.alive,
        reached=followed.reached,
        multipliers=answer.alpha,
        **_attempts.proof_of(answer, answer.value, started),
    )


@dataclass(frozen=True)
class Goal:
    """The objective of the program: tokens − price·divergence, or tokens within a budget."""

    form: str
    amount: float

    def value(self, followed: Followed) -> float:
        """Return the objective; ``followed`` is the exact result of verifying against some rows."""
        if self.form != PRICE:
            return followed.tokens
        # at a price of 0 even an infinite divergence costs nothing
        return followed.tokens - (self.amount * followed.divergence if self.amount else 0.0)

    def excess(self, followed: Followed) -> float:
        """Return by how much rows exceed the budget; −∞ if the goal is a price."""
        if self.form == PRICE:
            return -math.inf
        return followed.divergence - self.amount * followed.tokens

    def bound(self, tree: PathTree, alpha: np.ndarray, f: FDivergence, price: float) -> float:
        """Return a proven upper bound on the objective, from multipliers α and a price ν.

        With the bound B at the price ν, a budget κ per token has tokens ≤ B/(1 − νκ).
        """
        proven = price_bound(tree, alpha, f, price)
        # the budget may be infinite, at a price of 0
        paid = price * self.amount if price and self.form != PRICE else 0.0
        return proven / (1 - paid) if paid < 1 else math.inf


@dataclass(frozen=True)
class Answer:
    """An answer of a solver: h and α (nodes, V), the exact result of verifying against h, proof."""

    target: np.ndarray
    alpha: np.ndarray
    followed: Followed
    value: float
    price: float
    bound: float
    solver: str
    status: str


@dataclass(frozen=True)
class Program(TreeProgram[Answer]):
    """The block program for a tree, an f-divergence and a goal."""

    tree: PathTree
    f: FDivergence
    goal: Goal

    @cached_property
    def layout(self) -> Layout:
        """Return the entries of the program."""
        return Layout.of([self.tree])

    @property
    def linear(self) -> bool:
        """Return whether the program is linear, so that a simplex method can solve it."""
        return self.f.linear

    @property
    def guess(self) -> np.ndarray:
        """Return a positive guess of h, the scale of the variables: the draft row, clipped.

        The lower limit is q. The upper limit is the most that is worthwhile at the price ν: a unit
        of mass gains at most 1 + K tokens, so ν f′(h/q) exceeds its value at h = q by no more. For
        a budget, or an f that is not smooth, the guess is a heuristic: the geometric mean of q and
        max(p, q).
        """
        q, p = self.layout.q, self.layout.p
        if self.goal.form != PRICE or not self.f.smooth:
            return np.sqrt(q * np.maximum(p, q))
        step = (self.tree.depth + 1) / self.goal.amount
        slope = torch.tensor(self.f.slope_at_one + step, dtype=torch.float64)
        return np.clip(p, q, q * float(self.f.ratio_at(slope)))

    def built(self, scale: np.ndarray) -> tuple[Any, Flow, tuple[Any, ...]]:
        """Return the problem for one scale, its flow, and the constraint of a budget, if any."""
        cp, goal, flow = cvxpy(), self.goal, Flow(self.layout, scale, np.ones(1))
        spent, forms = flow.spent(self.f)
        limits = [*flow.limits, *forms]
        if goal.form == PRICE:
            return cp.Problem(cp.Maximize(flow.tokens - goal.amount * spent), limits), flow, ()
        budget = spent <= goal.amount * flow.tokens
        return cp.Problem(cp.Maximize(flow.tokens), [*limits, budget]), flow, (budget,)

    def answered(self, rows: np.ndarray, flow: Flow, more: tuple, labels: tuple) -> Answer:
        """Return the answer, with α (nodes, V) and ν converted to maximising tokens − ν·divergence.

        The right side of a budget is κ times the tokens. So with the budget's multiplier y a token
        counts 1 + yκ in the Lagrangian; α and y are divided by this number.
        """
        # ``more`` is the constraint of a budget, and empty at a price
        price = max(0.0, float(np.sum(more[0].dual_value))) if more else self.goal.amount
        unit = 1 + price * self.goal.amount if self.goal.form == PER_TOKEN else 1.0
        alpha, price = flow.multipliers[0] / unit, price / unit
        followed = follow(self.tree, rows[0], self.f)
        bound = self.goal.bound(self.tree, alpha, self.f, price)
        return Answer(rows[0], alpha, followed, self.goal.value(followed), price, bound, *labels)

    def excess(self, answer: Answer) -> float:
        """Return by how much an answer exceeds the budget."""
        return self.goal.excess(answer.followed)

    def size(self, answer: Answer) -> np.ndarray:
        """Return g (1, nodes, V) of an answer."""
        return (answer.followed.alive[: len(answer.target), None] * answer.target)[None]


def _goal(**knobs: float | None) -> Goal:
    amounts = {name: amount for name, amount in knobs.items() if amount is not None}
    if len(amounts) != 1:
        raise ValueError(
            f"price: must be given, or else per_token, exactly one; "
            f"got {', '.join(amounts) or 'none'}"
        )
    ((name, amount),) = amounts.items()
    return Goal(name, check.number(name, amount, 0.0, math.inf))


def _without_solver(tree: PathTree, f: FDivergence, goal: Goal) -> Answer | None:
    """Return the answer if nothing may be spent or the budget never binds, else None."""
    strict, free = (math.inf, 0.0) if goal.form == PRICE else (0.0, math.inf)
    if goal.amount == strict:
        return _known(tree, tree.target, f, math.inf)
    accepts_all = _known(tree, accepting_rows(tree), f, 0.0)
    if goal.amount == free or (goal.form != PRICE and goal.excess(accepts_all.followed) <= 0):
        return accepts_all
    return None


def _known(tree: PathTree, rows: np.ndarray, f: FDivergence, price: float) -> Answer:
    """Return the answer of rows that are optimal without a solver, with a proof.

    These are the lossless rows (price ∞), or the rows that accept every possible token (price 0).
    """
    followed = follow(tree, rows, f)
    alpha = lossless_multipliers(tree, followed.alive) if price else np.zeros_like(rows)
    bound = price_bound(tree, alpha, f, price)
    return Answer(rows, alpha, followed, followed.tokens, price, bound, "identity", "exact")


def accepting_rows(tree: PathTree) -> np.ndarray:
    """Return the rows (nodes, V) nearest to q that accept every drafted token with q > 0.

    h = max(p, a q), where a makes the sum 1, has the least divergence of all rows with h ≥ p where
    q > 0.
    """
    q, p = tree.target, np.where(tree.target > 0, tree.draft, 0.0)
    ends = np.zeros((len(q), 1)), np.ones((len(q), 1))
    low, _ = halved(*ends, lambda a: np.maximum(p, a * q).sum(-1, keepdims=True) <= 1, HALVINGS)
    return np.maximum(p, low * q)
