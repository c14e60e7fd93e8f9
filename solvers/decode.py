r"""The decode program: the fewest target calls a token, over all ways to verify a long text.

.. math:: \max_{μ, g, t} \; Σ_s Σ_u t_s(u) \;\text{ s.t. }\;
   t_s(ux) \le g_s(u, x),\; t_s(ux) \le μ_s p_s(ux),\; Σ_x g_s(u, x) = t_s(u),\;
   t_s(\text{root}) = μ_s,\; Σ_s μ_s = 1, \\
   Σ_s Σ_u D(g_s(u)\|t_s(u) q_s(u)) \le κ Σ_s Σ_u t_s(u), \qquad
   μ_{s'} = \Pr(\text{a round ends in } s')

for two Markov models, whose rows depend only on the state s of the text, the last token. μ_s is how
often a round begins in state s, and each state has the block program (:mod:`solvers.block`) of K
drafted tokens, scaled by μ_s. Every verifier of a long text whose bonus tokens come from the target
satisfies these constraints on average, even if it plans from round to round. Verifying each block
against h = g/t attains the optimum if all rounds lead into one closed set of states (a set that no
round leaves). So the value is a ceiling on tokens per target call at κ of metered divergence per
emitted token. The proof is the dual: let π_s be any number for each state s, and ν ≥ 0 any price of
divergence. Let B_s be the bound of the block program in which an emitted token earns 1 + νκ, a unit
of divergence costs ν, and ending in s' earns π_{s'}. A round from s then earns at most B_s. In a
long text rounds end in s as often as they begin there, so the numbers π cancel, and the tokens per
target call are at most :math:`\max_s (B_s − π_s)`. Source: THEORY.md, Theorem 20.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.divergences import Divergence, FDivergence

from . import _attempts
from ._dual_bounds import price_bound
from ._perspective import counted, cvxpy, times
from ._tree_program import Flow, Layout, TreeProgram
from .path_tree import Followed, PathTree, count_prefixes, follow, state_tree

# squarings of the chain of states: 2^60 rounds, after which only recurrent states have mass
SQUARINGS = 60
# most prefixes of all states together, and most cells of the matrix of end states (64 MiB)
MOST_PREFIXES, MOST_CELLS = 20_000, 2**23


@dataclass(frozen=True)
class DecodeProgram:
    """The solution of the decode program: tokens per target call, rows, and the proof."""

    tokens: float  # per target call in a long text, the recovered or bonus token included
    divergence: float  # metered per emitted token, in the divergence's unit (nats for KL)
    price: float  # tokens per call that another unit of divergence per call would buy
    bound: float  # proven upper bound on tokens per call
    gap: float  # bound minus tokens
    occupancy: np.ndarray  # (S,) how often a round begins in each state
    target: np.ndarray  # (S, nodes, V) h, the row to verify against at each prefix of each tree
    solver: str  # the solver
    status: str  # the solver's status
    seconds: float  # wall time, building the program included


def solve(
    target_probs: Any,
    draft_probs: Any,
    num_draft_tokens: int,
    divergence: str | Divergence = "kl",
    *,
    per_token: float,
) -> DecodeProgram:
    r"""Maximise tokens per target call within a budget of metered divergence per emitted token.

    Every answer is checked. The solver's rows are clipped, divided by their sums, and followed
    through every tree and the chain of states, so ``tokens`` and ``divergence`` are the exact
    results of verifying against ``target``. ``tokens`` must be within 1e-6 of a proven bound, and
    the budget is kept within 1e-7. If the states have several closed sets, the value is that of the
    best set.

    Parameters
    ----------
    target_probs, draft_probs : (V, V), one row for each last token.
    num_draft_tokens : K ≥ 1.
    divergence : an f-divergence: spec string (``kl``, ``alpha:a=0.5``, …) or a Divergence.
    per_token : budget κ ≥ 0, in the divergence's unit; 0 is lossless, ∞ is no budget.

    Raises
    ------
    ValueError
        Not (V, V) rows of probabilities, a negative budget, a Rényi or max-divergence, more than
        5,000 prefixes in a state or 20,000 in all states, or states × prefixes of all states × V
        above 2²³.
    SolverGaveUp, ModuleNotFoundError
        No answer passed the check (a RuntimeError); cvxpy is missing.
    """
    started = time.perf_counter()
    kind = _attempts.additive(divergence)
    budget = check.number("per_token", per_token, 0.0, math.inf)
    depth = check.as_whole_number("num_draft_tokens", num_draft_tokens, 1)
    target, draft = (row.numpy() for row in tensors.probability_rows(target_probs, draft_probs))
    _check_size(target.shape, depth)
    trees = [state_tree(target, draft, depth, state) for state in range(len(target))]
    paths, states = zip(*trees, strict=True)
    program = Program(paths, np.stack(states), kind, budget)
    answer = program.solve(program.layout.q)
    return DecodeProgram(
        tokens=answer.value,
        divergence=answer.divergence,
        price=answer.price,
        occupancy=answer.occupancy,
        target=answer.target,
        **_attempts.proof_of(answer, answer.value, started),
    )


def _check_size(shape: tuple[int, ...], depth: int) -> None:
    """Raise ValueError if ``shape`` is not (V, V), or if the program would be too large."""
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"target_probs: must be (V, V), a row after each token; got shape {shape}")
    states = shape[0]
    prefixes = states * count_prefixes(states, depth)
    for size, most, what in (
        (prefixes, MOST_PREFIXES, "prefixes of all states"),
        (states * prefixes * states, MOST_CELLS, "states x prefixes of all states x tokens"),
    ):
        if size > most:
            raise ValueError(
                f"target_probs, num_draft_tokens: must leave at most {most:,} {what}; {states:,} "
                f"states and {depth} drafted tokens have {size:,}"
            )


@dataclass(frozen=True)
class Answer:
    """An answer of a solver: rows, their exact results in a long text, and the proof."""

    target: np.ndarray
    followed: list[Followed]
    occupancy: np.ndarray
    price: float
    bound: float
    solver: str
    status: str

    @property
    def value(self) -> float:
        """Return the tokens per target call."""
        return float(self.occupancy @ [each.tokens for each in self.followed])

    @property
    def divergence(self) -> float:
        """Return the metered divergence per token."""
        return float(self.occupancy @ [each.divergence for each in self.followed]) / self.value


@dataclass(frozen=True)
class Program(TreeProgram[Answer]):
    """The decode program of S trees; ``states`` (S, nodes + V^K) has each prefix's last token."""

    trees: Sequence[PathTree]
    states: np.ndarray
    f: FDivergence
    limit: float  # κ, the most divergence per token

    @property
    def linear(self) -> bool:
        """Return whether the program is linear; so is any program with a budget of 0 or ∞."""
        return self.f.linear or self.limit in (0.0, math.inf)

    @cached_property
    def layout(self) -> Layout:
        """Return the entries of the program."""
        return Layout.of(self.trees)

    def answered(self, rows: np.ndarray, flow: Flow, more: tuple, labels: tuple) -> Answer:
        """Return the answer: exact results, occupancy of the states, price and bound."""
        rounds, balance, budget = more
        followed = [follow(tree, h, self.f) for tree, h in zip(self.trees, rows, strict=True)]
        per_state = zip(self.states, rows, followed, strict=True)
        moves = np.stack([self._ends(prefixes, h, result) for prefixes, h, result in per_state])
        occupancy = settled(np.maximum(rounds.value, 0.0), moves)
        return Answer(rows, followed, occupancy, *self._proof(flow, balance, budget), *labels)

    def excess(self, answer: Answer) -> float:
        """Return by how much an answer exceeds the budget."""
        return (answer.divergence - self.limit) * answer.value

    def size(self, answer: Answer) -> np.ndarray:
        """Return g (S, nodes, V) of an answer."""
        alive = np.stack([each.alive for each in answer.followed])[:, : answer.target.shape[1]]
        return answer.occupancy[:, None, None] * alive[..., None] * answer.target

    def built(self, scale: np.ndarray) -> tuple[Any, Flow, tuple[Any, ...]]:
        """Return the problem for one scale, its flow, and (μ, balance of states, budget)."""
        cp, layout = cvxpy(), self.layout
        rounds = cp.Variable(len(self.trees), nonneg=True)
        flow = Flow(layout, scale, rounds)
        balance = (self._arrivals(flow) - rounds)[:-1] == 0
        limits, budget = [*flow.limits, balance, cp.sum(rounds) == 1], None
        if self.limit == 0:  # h = q at every node
            limits.append(times(scale, flow.w) == times(layout.q, flow.alive))
        elif not math.isinf(self.limit):
            spent, forms = flow.spent(self.f)
            budget = spent <= self.limit * flow.tokens
            limits += [*forms, budget]
        return cp.Problem(cp.Maximize(flow.tokens), limits), flow, (rounds, balance, budget)

    def _proof(self, flow: Flow, balance: Any, budget: Any | None) -> tuple[float, float]:
        """Return the price of divergence and a proven bound on the tokens per call."""
        # without a budget constraint κ is ∞, where divergence is free, or 0, which forces h = q
        price, unit = (0.0 if self.limit else math.inf), 1.0
        if budget is not None:
            price = max(0.0, float(np.sum(budget.dual_value)))
            unit = 1 + price * self.limit
        # the balance of the last state follows from the others, so its potential is 0
        potentials = np.append(-balance.dual_value, 0.0)
        bounds = []
        for state, alpha in enumerate(flow.multipliers):
            # the states after all K tokens come after those of the nodes
            last = self.states[state, len(alpha) :]
            of_round = price_bound(
                self.trees[state],
                alpha,
                self.f,
                price,
                unit=unit,
                ends=potentials,
                after=self._bonus[last] @ potentials,
            )
            bounds.append(of_round - potentials[state])
        return price, float(max(bounds))

    def _arrivals(self, flow: Flow) -> Any:
        """Return how often rounds end in each state (S,), a linear function of g and t.

        A state is the last token of a text, and its number is the token's. So a recovered token x
        at a node u, with probability g(u, x) − t(ux), ends a round in state x. After all K tokens
        the bonus token, drawn from the target, is the state.
        """
        # in the variables of ``flow``, with p(u) the probability of drafting u (``weight``):
        # g(u, x) = p(u) s w, s the program's ``scale``, and t(ux) = p(u) p_x · ``accepted``
        layout, count = self.layout, len(self.trees)
        children, prefix = layout.children, layout.child_prefixes
        # a product with this matrix adds entries up by token
        by_token = counted(layout.token, np.arange(len(layout.token)), (count, len(layout.token)))
        all_accepted = prefix >= layout.target.shape[1]
        bonus = self._bonus[self.states[layout.start[children], prefix]].T * all_accepted
        emitted = times(layout.weight * flow.scale, flow.w)
        accepted = times((layout.weight * layout.p)[children], flow.accepted)
        return by_token @ emitted + (bonus - by_token[:, children].toarray()) @ accepted

    def _ends(self, states: np.ndarray, rows: np.ndarray, followed: Followed) -> np.ndarray:
        """Return the exact probability (S,) that a round ends in each state, with ``rows`` as h."""
        nodes = len(rows)
        emitted = followed.reached[:nodes, None] * rows
        # breadth first, the prefixes after the root are the children of node 0, of node 1, …
        recovered = np.maximum(emitted - followed.reached[1:].reshape(rows.shape), 0.0)
        bonus = followed.reached[nodes:] @ self._bonus[states[nodes:]]
        return bonus + recovered.sum(0)

    @cached_property
    def _bonus(self) -> np.ndarray:
        """Return the target's row in each state, (S, S)."""
        return np.stack([tree.target[0] for tree in self.trees])


def settled(begun: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the long-run law (S,) of a Markov chain that begins with the law ``begun``.

    The lazy chain (stay with probability ½) has the same long-run law and no periods, so repeated
    squaring of its matrix converges.
    """
    lazy = (np.eye(len(moves)) + moves / moves.sum(-1, keepdims=True)) / 2
    for _ in range(SQUARINGS):
        lazy = lazy @ lazy
        lazy /= lazy.sum(-1, keepdims=True)
    law = begun @ lazy
    return law / law.sum()
