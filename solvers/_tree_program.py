"""Build programs on trees of drafted paths: variables, constraints of every verifier, and checks.

Used by :mod:`solvers.block`, which defines g, t and p, and by :mod:`solvers.decode`. A program has
variables only for the part of a tree that can be reached, and all are of order one. At every node u
the variable is w, with g = p(u) s∘w and a fixed scale s. For every child that can be drafted the
variable is the alive ratio P = t/p. In these variables t ≤ g becomes (p/s) P ≤ w, t ≤ p(ux) becomes
P ≤ 1, Σ g = t becomes s·w = P, and a node pays p(u) Σ q P f(s w/(qP)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cactus_theory.divergences import FDivergence

from . import _attempts
from ._attempts import FEASIBILITY, SMALLEST_SCALE, Attempted, Solution, Solver, unproven
from ._perspective import Terms, counted, cvxpy, perspective, times
from .path_tree import PathTree


@dataclass(frozen=True)
class Layout:
    """The m entries of a program: the tokens with q > 0 at the nodes that can be reached.

    The entries of S trees of one shape follow one another. ``start``, ``node`` and ``token`` (m,)
    are the tree, the node and the token of each entry.
    """

    trees: Sequence[PathTree]
    start: np.ndarray
    node: np.ndarray
    token: np.ndarray

    @classmethod
    def of(cls, trees: Sequence[PathTree]) -> "Layout":
        reachable = [tree.possible[: len(tree.target), None] > 0 for tree in trees]
        kept = [tree.target > 0 for tree in trees]
        return cls(trees, *np.nonzero(np.stack(reachable) & np.stack(kept)))

    @cached_property
    def target(self) -> np.ndarray:
        return np.stack([tree.target for tree in self.trees])  # (S, nodes, V)

    @cached_property
    def q(self) -> np.ndarray:
        return self.entries(self.target)

    @cached_property
    def p(self) -> np.ndarray:
        return self.entries(np.stack([tree.draft for tree in self.trees]))

    @cached_property
    def weight(self) -> np.ndarray:
        return np.stack([tree.possible for tree in self.trees])[self.start, self.node]

    @cached_property
    def children(self) -> np.ndarray:
        """Return the numbers (n,) of entries that may be drafted; each leads to another prefix."""
        return np.flatnonzero(self.weight * self.p > 0)

    @property
    def child_prefixes(self) -> np.ndarray:
        """Return the number (n,) of each child's prefix in its tree."""
        return (self.node * self.target.shape[-1] + self.token + 1)[self.children]

    @property
    def alive_at(self) -> Any:
        """Return the matrix (m, n) that maps the children's P to the alive ratio at entries' nodes.

        A row is 0 if the entry's node is a root. Elsewhere the alive ratio at a node is the
        variable P of the child that leads to the node.
        """
        count, inner = len(self.children), np.flatnonzero(self.node > 0)
        child_of = np.zeros((len(self.trees), len(self.trees[0].possible)), dtype=int)
        child_of[self.start[self.children], self.child_prefixes] = np.arange(count)
        columns = child_of[self.start[inner], self.node[inner]]
        return counted(inner, columns, shape=(len(self.q), count))

    def entries(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.start, self.node, self.token]

    def spread(self, entries: np.ndarray) -> np.ndarray:
        """Return entries (m,) as rows (S, nodes, V), 0 elsewhere."""
        rows = np.zeros_like(self.target)
        rows[self.start, self.node, self.token] = entries
        return rows

    def normalised(self, raw: np.ndarray) -> np.ndarray:
        """Return ``raw`` (m,) as rows (S, nodes, V) divided by their sums; q where a sum is 0."""
        rows = self.spread(np.maximum(raw, 0.0))
        mass = rows.sum(-1, keepdims=True)
        return np.where(mass > 0, rows / np.where(mass > 0, mass, 1.0), self.target)


class Flow:
    """The constraints that every verifier satisfies, in scaled variables, on S trees.

    ``rounds`` (S,) is how often a round begins at each tree. ``alive`` (m,) is P at each entry's
    node times ``rounds``, and ``accepted`` (n,) is P at each child's prefix times ``rounds``.
    ``tokens`` is the number of emitted tokens. The first of ``limits`` is t ≤ g.
    """

    def __init__(self, layout: Layout, scale: np.ndarray, rounds: Any) -> None:
        cp, children, begun = cvxpy(), layout.children, rounds[layout.start]
        self.layout, self.scale = layout, scale
        self.w = cp.Variable(len(scale), nonneg=True)
        self.accepted = cp.Variable(len(children), nonneg=True)
        self.alive = layout.alive_at @ self.accepted + times((layout.node == 0) * 1.0, begun)
        emission = times(layout.p[children] / scale[children], self.accepted) <= self.w[children]
        # Σ g = t at each node: nodes of all trees are numbered from 0, P is read at the first entry
        number = layout.start * layout.target.shape[1] + layout.node
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        mass = counted(number, np.arange(len(number))) @ times(scale, self.w)
        self.limits = [emission, self.accepted <= begun[children], mass == self.alive[first]]
        self.tokens = cp.sum(rounds) + (layout.weight * layout.p)[children] @ self.accepted

    def spent(self, f: FDivergence) -> tuple[Any, list[Any]]:
        """Return the metered divergence, and the constraints on its auxiliary variables."""
        terms = Terms(self.w, self.alive, self.scale / self.layout.q)
        return (self.layout.weight * self.layout.q) @ perspective(terms, f), terms.constraints

    @property
    def multipliers(self) -> np.ndarray:
        """Return the multipliers α (S, nodes, V) of t ≤ g, after the program was solved."""
        children, alpha = self.layout.children, np.zeros(len(self.scale))
        # in the program t ≤ g is divided by p(u) s
        unit = self.layout.weight[children] * self.scale[children]
        alpha[children] = self.limits[0].dual_value / unit
        return self.layout.spread(alpha)


class TreeProgram(Attempted[Solution]):
    """A program on trees, whose answers have ``target``, ``value``, ``bound`` and ``status``.

    A subclass has these methods:

    * ``built(scale)`` returns the problem for one scaling, its :class:`Flow`, and further variables
      and constraints, whose values ``answered`` reads;
    * ``answered(rows, flow, more, labels)`` returns the answer for rows (S, nodes, V);
    * ``excess(answer)`` returns by how much the answer exceeds the budget;
    * ``size(answer)`` returns g (S, nodes, V) of an answer, the scale of the next attempt.
    """

    promise = f"the rows must keep their budget within {FEASIBILITY:g} and meet their dual bound"
    layout: Any
    built: Any
    answered: Any
    excess: Any
    size: Any

    def attempt(self, scale: np.ndarray, solver: Solver) -> Solution | None:
        problem, flow, more = self.built(scale)
        if not _attempts.believable(problem, *solver) or flow.limits[0].dual_value is None:
            return None
        rows = self.layout.normalised(scale * flow.w.value)
        return self.answered(rows, flow, more, (solver[0], problem.status))

    def fault(self, answer: Any) -> str | None:
        if not (excess := self.excess(answer)) <= FEASIBILITY:
            return f"{answer.status}, but the budget is exceeded by {excess:.3g}"
        return unproven(answer.status, answer.value, answer.bound)

    def rescaled(self, answer: Any, scale: np.ndarray) -> np.ndarray:
        q = self.layout.q
        if answer is None:
            return q
        return np.maximum(self.layout.entries(self.size(answer)), SMALLEST_SCALE * q)
