r"""The decode program: the fewest target calls a token, over all ways to verify a long text.

.. math:: \max_{μ, g, t} \; Σ_s Σ_u t_s(u) \;\text{ s.t. }\;
   t_s(ux) \le g_s(u, x),\; t_s(ux) \le μ_s p_s(ux),\; Σ_x g_s(u, x) = t_s(u),\;
   t_s(\text{root}) = μ_s,\; Σ_s μ_s = 1, \\
   Σ_s Σ_u D(g_s(u)\|t_s(u) q_s(u)) \le κ Σ_s Σ_u t_s(u), \qquad
   μ_{s'} = \Pr(\text{a round ends in } s')

for two models whose rows depend on a state s of the text. μ is how often a round begins in each
state, and each state has the block program (:mod:`solvers.block`) of K drafted tokens, scaled by
μ. Every verifier of a long text whose bonus tokens come from the target keeps to these limits on
average, whatever it knows and however it plans from round to round; verifying each block towards
h = g/t reaches them if rounds lead to one closed set of states. So the value is a ceiling on
tokens per target call at κ of metered divergence per emitted token. The dual gives
the proof: with the potential π_s of beginning a round in s, a round from s is worth at most what
the block program's dual allows where ending it in s' earns π_{s'}. Source: THEORY.md, Theorem 20.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence, FDivergence

from . import _program
from ._dual import price_bound
from ._perspective import Terms, cvxpy, perspective, times
from ._program import FEASIBILITY, SMALLEST_SCALE, Attempted, Solver, unproven
from .block import Layout
from .paths import Followed, PathTree, check_count, count_prefixes, follow, state_tree

# the lazy chain of states is squared so often that only its recurrent part is left
SQUARINGS = 60
# of all states together: prefixes, and cells of what says in which state a round ends (64 MiB)
MOST_PREFIXES, MOST_CELLS = 20_000, 2**23


@dataclass(frozen=True)
class DecodeProgram:
    """A solved decode program."""

    tokens: float  # per target call in a long text, the recovered or bonus token included
    divergence: float  # metered per emitted token, in the divergence's unit (nats for KL)
    price: float  # tokens per call that another unit of divergence per call would buy
    bound: float  # proven upper bound on tokens per call
    gap: float  # bound minus tokens
    occupancy: np.ndarray  # (S,) how often a round begins in each state
    target: np.ndarray  # (S, nodes, V) h, the row to verify against at each prefix of each tree
    solver: str  # what solved it
    status: str  # what it said
    seconds: float  # wall time, building the program included

    def report(self) -> str:
        """Return what was found in a few lines of plain text."""
        return (
            f"tokens      {self.tokens:.9g} per call, {self.bound:.9g} at most; "
            f"gap {self.gap:.1e}\n"
            f"divergence  {self.divergence:.9g} per token\n"
            f"price       {self.price:.6g}\n"
            f"solver      {self.solver}, {self.status}, {self.seconds:.3f} s"
        )


def solve(
    target_probs: Any,
    draft_probs: Any,
    num_draft_tokens: int,
    divergence: str | Divergence = "kl",
    *,
    per_token: float,
    following: Any = None,
) -> DecodeProgram:
    r"""Maximise tokens per target call within a budget of metered divergence per emitted token.

    The answer is checked: the solver's rows are clipped, divided by their sums and followed
    through every tree and the chain of states, so that ``tokens`` and ``divergence`` are what
    verifying towards ``target`` comes to; ``tokens`` must meet a proven bound within 1e-6, and
    the budget is kept within 1e-7. Where some states are never left for others, rounds are
    counted in the best of the closed sets.

    Parameters
    ----------
    target_probs, draft_probs : (S, V), the row of each state; in a Markov model of order one a
        state is the last token.
    num_draft_tokens : K ≥ 1.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    per_token : budget κ ≥ 0, in the divergence's unit; 0 is lossless, ∞ free.
    following : (S, V) the state after each token; None: the token itself, which needs S = V.

    Raises
    ------
    ValueError
        Rows that are none, states that are not there, a negative budget, a Rényi or
        max-divergence, more than 5,000 prefixes a state or 20,000 of all states, more than 2²³
        of states × prefixes of all states × V.
    SolverGaveUp, ModuleNotFoundError
        No answer passed its own check (a RuntimeError); cvxpy is missing.
    """
    started = time.perf_counter()
    kind = _program.additive(divergence)
    budget = check.number("per_token", per_token, 0.0, math.inf)
    depth = check_count("num_draft_tokens", num_draft_tokens)
    target, draft = (row.numpy() for row in check.probability_rows(target_probs, draft_probs))
    moves = _following(following, target.shape)
    _check_size(moves.shape, depth)
    trees = [state_tree(target, draft, moves, depth, state) for state in range(len(target))]
    paths, states = map(list, zip(*trees, strict=True))
    program = Program(paths, states, moves, kind, budget)
    answer = program.solve(program.stacked("q"))
    return DecodeProgram(
        tokens=answer.tokens,
        divergence=answer.divergence,
        price=answer.price,
        bound=answer.bound,
        gap=answer.bound - answer.tokens,
        occupancy=answer.occupancy,
        target=answer.target,
        solver=answer.solver,
        status=answer.status,
        seconds=time.perf_counter() - started,
    )


def _following(following: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the state after each token, (S, V)."""
    if len(shape) != 2:
        raise ValueError(f"target_probs: must be (S, V), a row a state; got shape {shape}")
    if following is None:
        if shape[0] != shape[1]:
            raise ValueError(
                "target_probs: must be (V, V), a row after each token, unless following= says the "
                f"state after each; got {shape}"
            )
        return np.tile(np.arange(shape[1]), (shape[0], 1))
    moves = np.asarray(following)
    if moves.shape != shape or moves.dtype.kind not in "iu":
        raise ValueError(f"following: must be integers {shape}; got {moves.dtype} {moves.shape}")
    if moves.min() < 0 or moves.max() >= shape[0]:
        span = f"{moves.min()} to {moves.max()}"
        raise ValueError(f"following: must be states from 0 to {shape[0] - 1}; got {span}")
    return moves


def _check_size(shape: tuple[int, ...], depth: int) -> None:
    """Raise for a program of rows (S, V) that is too large, before any of it is built."""
    states, vocabulary = shape
    prefixes = states * count_prefixes(vocabulary, depth)
    for size, most, what in (
        (prefixes, MOST_PREFIXES, "prefixes of all states"),
        (states * prefixes * vocabulary, MOST_CELLS, "states x prefixes of all states x tokens"),
    ):
        if size > most:
            raise ValueError(
                f"target_probs, num_draft_tokens: must leave at most {most:,} {what}; {states:,} "
                f"states of {vocabulary:,} tokens and {depth} drafted ones have {size:,}"
            )


@dataclass(frozen=True)
class Answer:
    """A checked answer: rows, what they come to in a long text, and the proof."""

    target: np.ndarray
    followed: list[Followed]
    occupancy: np.ndarray
    price: float
    bound: float
    solver: str
    status: str

    @property
    def tokens(self) -> float:
        """Return the tokens per call."""
        return float(self.occupancy @ [each.tokens for each in self.followed])

    @property
    def divergence(self) -> float:
        """Return the metered divergence per token."""
        return float(self.occupancy @ [each.divergence for each in self.followed]) / self.tokens


@dataclass(frozen=True)
class Program(Attempted[Answer]):
    """The program of S trees; ``states`` are those at every prefix, (nodes + V^K,) each."""

    trees: list[PathTree]
    states: list[np.ndarray]
    following: np.ndarray
    f: FDivergence
    budget: float

    promise = f"the rows must keep their budget within {FEASIBILITY:g} and meet their dual bound"

    @property
    def linear(self) -> bool:
        """Return whether a simplex method can solve it: nothing or anything may be spent, too."""
        return self.f.linear or self.budget in (0.0, math.inf)

    @cached_property
    def layouts(self) -> list[Layout]:
        """Return the tokens that each tree's part of the program is about."""
        return [Layout.of(tree) for tree in self.trees]

    def attempt(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        """Return one solver's answer, its rows followed exactly, with its bound."""
        built = self._built(scale)
        if not _program.believable(built.problem, *solver) or built.emission.dual_value is None:
            return None
        parts = zip(self.layouts, self._split(scale * built.w.value), strict=True)
        target = np.stack([layout.normalised(part) for layout, part in parts])
        rounds = zip(self.trees, target, strict=True)
        followed = [follow(tree, rows, self.f) for tree, rows in rounds]
        ends = zip(self.states, target, followed, strict=True)
        moves = np.stack([self._ends(*each) for each in ends])
        occupancy = settled(np.maximum(built.rounds.value, 0.0), moves)
        price, bound = self._proof(scale, built)
        return Answer(target, followed, occupancy, price, bound, solver[0], built.problem.status)

    def fault(self, answer: Answer) -> str | None:
        """Return what an answer breaks, None if it keeps its budget and meets its bound."""
        excess = (answer.divergence - self.budget) * answer.tokens
        if not excess <= FEASIBILITY:
            return f"{answer.status}, but the budget is exceeded by {excess:.3g}"
        return unproven(answer.status, answer.tokens, answer.bound)

    def rescaled(self, answer: Answer | None, scale: np.ndarray) -> np.ndarray:
        """Return the size of g at an answer, or q if there was none."""
        q = self.stacked("q")
        if answer is None:
            return q
        trees = zip(answer.occupancy, answer.followed, answer.target, self.layouts, strict=True)
        sizes = [
            share * followed.alive[layout.row] * rows[layout.row, layout.token]
            for share, followed, rows, layout in trees
        ]
        return np.maximum(np.concatenate(sizes), SMALLEST_SCALE * q)

    def _built(self, scale: np.ndarray) -> "_Built":
        cp, children, start = cvxpy(), self._children, self._start
        q, p, weight = (self.stacked(name) for name in ("q", "p", "weight"))
        rounds = cp.Variable(len(self.trees), nonneg=True)
        w, kept = cp.Variable(len(scale), nonneg=True), cp.Variable(len(children), nonneg=True)
        inside, root = zip(*(layout.alive_at for layout in self.layouts), strict=True)
        alive = _diagonal(inside) @ kept + times(np.concatenate(root), rounds[start])
        emission = times(p[children] / scale[children], kept) <= w[children]
        whole = _diagonal([layout.sums for layout in self.layouts]) @ times(scale, w)
        tokens = cp.sum(rounds) + (weight * p)[children] @ kept
        ends = self._arrivals(times(weight * scale, w), times((weight * p)[children], kept))
        balance = (ends - rounds)[:-1] == 0
        limits = [emission, kept <= rounds[start[children]], whole == alive[self._first]]
        limits += [balance, cp.sum(rounds) == 1]
        budget = None
        if self.budget == 0:
            limits.append(times(scale, w) == times(q, alive))
        elif not math.isinf(self.budget):
            terms = Terms(w, alive, scale / q)
            spent = (weight * q) @ perspective(terms, self.f)
            budget = spent <= self.budget * tokens
            limits += [*terms.constraints, budget]
        problem = cp.Problem(cp.Maximize(tokens), limits)
        return _Built(problem, w, rounds, emission, balance, budget)

    def _proof(self, scale: np.ndarray, built: "_Built") -> tuple[float, float]:
        """Return the price of divergence and a proven bound on the tokens per call."""
        price, unit = (0.0 if self.budget else math.inf), 1.0
        if built.budget is not None:
            price = max(0.0, float(np.sum(built.budget.dual_value)))
            unit = 1 + price * self.budget
        ending = np.append(-built.balance.dual_value, 0.0)
        alpha = np.zeros(len(scale))
        children, weight = self._children, self.stacked("weight")
        alpha[children] = built.emission.dual_value / (weight[children] * scale[children])
        bounds = []
        for state, entries in enumerate(self._split(alpha)):
            tree = self.trees[state]
            inner, last = np.split(self.states[state], [len(tree.target)])
            worth = {"ends": ending[self.following[inner]], "after": self._bonus[last] @ ending}
            rows = self.layouts[state].spread(entries)
            most = price_bound(tree, rows, self.f, price, unit=unit, **worth)
            bounds.append(most - ending[state])
        return price, float(max(bounds))

    def _arrivals(self, emitted: Any, kept: Any) -> Any:
        """Return how often rounds end in each state, (S,), from g (m,) and t (n,)."""
        count = len(self.trees)
        after, stays, bonus = [], [], []
        for layout, states in zip(self.layouts, self.states, strict=True):
            after.append(self.following[states[layout.row], layout.token])
            stays.append(after[-1][layout.children])
            prefix = layout.child_prefixes
            bonus.append(self._bonus[states[prefix]].T * (prefix >= len(layout.tree.target)))
        shift = np.concatenate(bonus, axis=1) - _counted(np.concatenate(stays), count).toarray()
        return _counted(np.concatenate(after), count) @ emitted + shift @ kept

    def _ends(self, states: np.ndarray, rows: np.ndarray, followed: Followed) -> np.ndarray:
        """Return (S,) how often a round towards ``rows`` ends in each state, exactly."""
        inner, last = np.split(states, [len(rows)])
        emitted = followed.reached[: len(rows), None] * rows
        recovered = np.maximum(emitted - followed.reached[1:].reshape(rows.shape), 0.0)
        ends = followed.reached[len(rows) :] @ self._bonus[last]
        np.add.at(ends, self.following[inner], recovered)
        return ends

    @cached_property
    def _bonus(self) -> np.ndarray:
        """Return (S, S) where a token of the target leads from each state."""
        moves = np.zeros((len(self.trees), len(self.trees)))
        for state, tree in enumerate(self.trees):
            np.add.at(moves[state], self.following[state], tree.target[0])
        return moves

    def stacked(self, name: str) -> np.ndarray:
        """Return an array of every layout, one after another: (m,)."""
        return np.concatenate([getattr(layout, name) for layout in self.layouts])

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum([0, *(len(layout.q) for layout in self.layouts)])

    @cached_property
    def _start(self) -> np.ndarray:
        """Return (m,) the state that each entry's tree is drafted from."""
        return np.repeat(np.arange(len(self.trees)), np.diff(self._offsets))

    @cached_property
    def _children(self) -> np.ndarray:
        return self._shifted("children")

    @cached_property
    def _first(self) -> np.ndarray:
        return self._shifted("first")

    def _shifted(self, name: str) -> np.ndarray:
        pairs = zip(self._offsets, self.layouts, strict=False)
        return np.concatenate([offset + getattr(layout, name) for offset, layout in pairs])

    def _split(self, entries: np.ndarray) -> list[np.ndarray]:
        return np.split(entries, self._offsets[1:-1])


def _diagonal(blocks: Iterable[Any]) -> Any:
    sparse = check.optional_module("scipy.sparse", "solvers")
    return sparse.block_diag(list(blocks), format="csr")


def _counted(states: np.ndarray, count: int) -> Any:
    """Return the matrix (count, n) that adds entries (n,) up by their states."""
    sparse = check.optional_module("scipy.sparse", "solvers")
    return sparse.csr_matrix(
        (np.ones(len(states)), (states, np.arange(len(states)))), (count, len(states))
    )


@dataclass(frozen=True)
class _Built:
    """A program in one scaling: w, μ, the constraints t ≤ g, the balance of states, the budget."""

    problem: Any
    w: Any
    rounds: Any
    emission: Any
    balance: Any
    budget: Any | None


def settled(begun: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the long-run law (S,) of a chain begun with the weights ``begun``."""
    lazy = (np.eye(len(moves)) + moves / moves.sum(-1, keepdims=True)) / 2
    for _ in range(SQUARINGS):
        lazy = lazy @ lazy
        lazy /= lazy.sum(-1, keepdims=True)
    law = begun @ lazy
    return law / law.sum()
