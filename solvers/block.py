r"""The block program: the best lossy verification of one drafted path, by any verifier.

.. math:: \max_{g, t} \; 1 + Σ t(ux) − ν Σ_u D(g_u\|t(u) q_u) \;\text{ s.t. }\;
   t(ux) \le g(u, x),\; t(ux) \le p(ux),\; Σ_x g(u, x) = t(u),\; t(\text{root}) = 1

over all prefixes u of fewer than K drafted tokens and all tokens x: p(ux) is the probability of
drafting ux, t(ux) that of accepting it too, g(u, x) that of emitting x after u. Every verifier of
one path keeps to these limits, whatever coins it shares and wherever it looks, and verifying
the block towards h = g/t keeps t at the least of them (Sun et al. 2024, arXiv 2403.10444): the
value is the optimum, and h reaches it. Divergence is metered: D(h‖q) at every node that is
reached, nothing for the bonus token. Source: THEORY.md, Theorem 13.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence

from . import _block, _program
from ._block import PRICE, Goal
from ._dual import halved, lossless_multipliers, price_bound
from .paths import PathTree, follow

# the bracket [0, 1] of a row's lower edge shrinks below an ulp
HALVINGS = 60


@dataclass(frozen=True)
class BlockProgram:
    """A solved block program; rows and prefixes in the tree's order.

    ``price`` is the ν at which the price form has this optimum: ∞ if it is lossless by force, 0 if
    everything that can be accepted is.
    """

    tokens: float  # per target call, the recovered or bonus token included
    divergence: float  # metered per call, in the divergence's unit (nats for KL)
    per_token: float  # metered per emitted token
    lossless: float  # tokens per call of lossless block verification, for comparison
    value: float  # what was maximised: tokens − price·divergence, or tokens within a budget
    price: float
    bound: float  # proven upper bound on the value
    gap: float  # bound minus value
    target: np.ndarray  # (nodes, V) h, the row to verify against; q where none is reached
    alive: np.ndarray  # (nodes + V^K,) the probability of accepting a prefix if drafted, t/p
    reached: np.ndarray  # (nodes + V^K,) t
    multipliers: np.ndarray  # (nodes, V) of t ≤ g: what mass on a token is worth at a price
    solver: str  # what solved it; ``identity`` if nothing had to
    status: str  # what it said
    seconds: float  # wall time, building the program included

    def report(self) -> str:
        """Return what was found in a few lines of plain text."""
        return (
            f"tokens      {self.tokens:.9g} per call   (lossless {self.lossless:.9g})\n"
            f"divergence  {self.divergence:.9g} per call, {self.per_token:.9g} per token\n"
            f"price       {self.price:.6g}\n"
            f"proof       {self.value:.9g} reached, {self.bound:.9g} at most; gap {self.gap:.1e}\n"
            f"solver      {self.solver}, {self.status}, {self.seconds:.3f} s"
        )


def solve(
    tree: PathTree,
    divergence: str | Divergence = "kl",
    *,
    price: float | None = None,
    per_call: float | None = None,
    per_token: float | None = None,
) -> BlockProgram:
    r"""Maximise tokens per target call at a price or within a budget of metered divergence.

    The answer is checked, not trusted. The solver's rows are clipped and divided by their sums
    and followed through the tree exactly, so that what is returned can be done: ``tokens``,
    ``divergence`` and ``value`` are those of ``target`` itself. The value must meet, within
    1e-6, an upper bound that holds at any multipliers (:mod:`solvers._dual`), and a budget
    is kept within 1e-7. Nothing is emitted where q = 0; prefixes with p = 0 have no variables.

    Parameters
    ----------
    tree : the rows by prefix. A second for about a hundred of them.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    price : ν ≥ 0, tokens given up for a unit of divergence; ∞ is lossless.
    per_call : budget κ ≥ 0 on the metered divergence of a target call.
    per_token : budget κ ≥ 0 on the metered divergence per emitted token (linear in t as well).
        Exactly one of the three.

    Raises
    ------
    ValueError
        Not exactly one of price and budgets, a negative one, a Rényi or max-divergence: their
        sums over nodes are no convex function of g and t.
    TypeError
        Not a PathTree.
    SolverGaveUp, ModuleNotFoundError
        No answer passed its own check (a RuntimeError); cvxpy is missing.
    """
    started = time.perf_counter()
    if not isinstance(tree, PathTree):
        raise TypeError(f"tree: must be a PathTree; got {type(tree).__name__}")
    kind = _program.additive(divergence)
    goal = _goal(price=price, per_call=per_call, per_token=per_token)
    program = _block.Program(_block.Layout.of(tree), kind, goal)
    answer = _without_solver(tree, kind, goal) or program.solve(program.guess)
    followed = answer.followed
    value = followed.tokens if answer.solver == "identity" else goal.value(followed)
    return BlockProgram(
        tokens=followed.tokens,
        divergence=followed.divergence,
        per_token=followed.per_token,
        lossless=follow(tree, tree.target, kind).tokens,
        value=value,
        price=answer.price,
        bound=answer.bound,
        gap=answer.bound - value,
        target=answer.target,
        alive=followed.alive,
        reached=followed.reached,
        multipliers=answer.alpha,
        solver=answer.solver,
        status=answer.status,
        seconds=time.perf_counter() - started,
    )


def _goal(**knobs: float | None) -> Goal:
    amounts = {name: amount for name, amount in knobs.items() if amount is not None}
    if len(amounts) != 1:
        raise ValueError(
            f"price: must be given, or else per_call or per_token, exactly one; "
            f"got {', '.join(amounts) or 'none'}"
        )
    ((name, amount),) = amounts.items()
    return Goal(name, check.number(name, amount, 0.0, math.inf))


def _without_solver(tree: PathTree, f: FDivergence, goal: Goal) -> _block.Answer | None:
    """Return the answer at the ends: nothing may be spent, or more than is needed."""
    nothing = math.inf if goal.form == PRICE else 0.0
    if goal.amount == nothing:
        return _known(tree, tree.target, f, math.inf)
    everything = _known(tree, accepting_rows(tree), f, 0.0)
    free = goal.amount == (0.0 if goal.form == PRICE else math.inf)
    if free or (goal.form != PRICE and goal.excess(everything.followed) <= 0):
        return everything
    return None


def _known(tree: PathTree, rows: np.ndarray, f: FDivergence, price: float) -> _block.Answer:
    """Return rows known to be optimal: the only lossless ones, or those accepting everything."""
    followed = follow(tree, rows, f)
    alpha = lossless_multipliers(tree, followed.alive) if price else np.zeros_like(rows)
    bound = price_bound(tree, alpha, f, price)
    return _block.Answer(rows, alpha, followed, price, bound, "identity", "exact")


def accepting_rows(tree: PathTree) -> np.ndarray:
    """Return the rows (nodes, V) nearest to q that accept every token with q > 0.

    h = max(p, a q), with mass 1, has the least divergence of all rows h ≥ p on q > 0.
    """
    q, p = tree.target, np.where(tree.target > 0, tree.draft, 0.0)
    ends = np.zeros((len(q), 1)), np.ones((len(q), 1))
    low, _ = halved(*ends, lambda a: np.maximum(p, a * q).sum(-1, keepdims=True) <= 1, HALVINGS)
    return np.maximum(p, low * q)
