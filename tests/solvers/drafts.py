r"""The program of several drafts at one node: the best that any rule can do with them.

.. math:: \max_{h, t} \; Σ_S Σ_{x ∈ S} t(S, x) \;\text{ s.t. }\;
   Σ_{x ∈ S} t(S, x) \le \Pr(S),\; Σ_S t(S, x) \le h_x,\; h ∈ Δ,\; D(h\|q) \le δ

over all sets S of tokens that may be drafted together: t(S, x) is the probability that they are
and that x of them is emitted. δ = 0 is the transport program of lossless drafts. It knows nothing
of selection laws, whose optimum it is the reference for. Source: THEORY.md, Theorem 21; lossless,
Hu et al. 2025 (arXiv 2502.18779).
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from cactus_theory.divergences import FDivergence
from solvers import _conic, _program
from solvers._dual import worth
from solvers._perspective import Scaled, cvxpy, times
from solvers._program import Answer, Solver
from solvers.per_proposal import raised_ceiling


@dataclass(frozen=True)
class Program(_program.Program):
    """The program, on the tokens with q > 0; ``cap`` is how often each is drafted at all."""

    kind: FDivergence
    members: np.ndarray = field(kw_only=True)  # (n, m) which tokens each set of drafts has
    law: np.ndarray = field(kw_only=True)  # (n,) the probability of each set

    @property
    def linear(self) -> bool:
        """Return whether a simplex method can solve it."""
        return super().linear or self.delta == 0

    def attempt(self, scale: np.ndarray, solver: Solver) -> Answer | None:
        """Return one solver's answer with its bound, or None if it has none."""
        cp = cvxpy()
        number, token = np.nonzero(self.members)
        row = Scaled(self.q, scale, cp.Variable(len(scale), nonneg=True))
        share = cp.Variable(len(number), nonneg=True)  # of each set, what is emitted of it
        sets = (number == np.arange(len(self.law))[:, None]).astype(float)
        tokens = (token == np.arange(len(self.q))[:, None]) * self.law[number]
        emission = times(1 / scale, tokens @ share) <= row.w
        limits = [emission, sets @ share <= 1, row.total == 1]
        budget = _conic.budget(row, self.kind, self.delta)
        spent = [row.w == self.q / scale] if self.delta == 0 else budget.constraints
        problem = cp.Problem(cp.Maximize(self.law[number] @ share), [*limits, *spent])
        if not _program.believable(problem, *solver) or emission.dual_value is None:
            return None
        h = np.maximum(scale * row.w.value, 0.0)
        price = math.inf if self.delta == 0 else budget.price
        # a set drafted is worth its best token less α, the row Σ α h − price·D at most
        alpha = np.clip(emission.dual_value / scale, 0.0, 1.0)
        left = np.max(np.where(self.members, 1 - alpha, 0.0), axis=-1)
        paid = price * self.delta if 0 < price < math.inf and self.delta < math.inf else 0.0
        best = worth(alpha[None], self.q[None], self.kind, price)
        bound = float(self.law @ left) + float(best[0]) + paid
        h = h / h.sum()
        spent = _program.divergence_of(self.kind, h, self.q)
        return Answer(h, 0.0, self.reached(h), spent, price, bound, solver[0], problem.status)

    def reached(self, h: np.ndarray) -> float:
        """Return the most that can be accepted of a row: 1 + min over H of h(H) − Pr(S ⊆ H)."""
        sets = np.array(list(itertools.product((False, True), repeat=len(h))))
        inside = ~(self.members[None] & ~sets[:, None]).any(-1)
        return self.law.sum() + float(np.min(sets @ h - inside @ self.law))


def solve(
    q: np.ndarray, p: np.ndarray, divergence: str, delta: float, k: int, kind: str, certain: list
) -> Answer:
    """Return the answer of one pair of a few tokens, its row over all of them."""
    f, (members, law) = _program.additive(divergence), drafted_sets(p, k, kind, certain)
    inside = q > 0
    target = np.zeros_like(q)
    sets = members[:, inside]
    program = Program(f, delta, q[inside], law @ sets, members=sets, law=law)
    scale = np.clip(program.cap, q[inside], raised_ceiling(q[inside], f, delta))
    answer = program.solve(scale)
    target[inside] = answer.h
    return replace(answer, h=target)


def drafted_sets(
    p: np.ndarray, k: int, kind: str, certain: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sets of tokens that may be drafted, (n, V) flags, and their law (n,)."""
    start = tuple(sorted(set(certain)))
    law: dict[tuple[int, ...], float] = {start: 1.0}
    for _ in range({"certain": 0, "iid": k, "without_replacement": k}.get(kind, 1)):
        law = _one_more(law, p, off=kind in ("certain+off", "without_replacement"))
    members = np.array([np.isin(range(len(p)), tokens) for tokens in law])
    return members, np.array(list(law.values()))


def _one_more(
    law: dict[tuple[int, ...], float], p: np.ndarray, off: bool
) -> dict[tuple[int, ...], float]:
    """Return the law of the sets with one token more, drawn from p, or from p off the set."""
    larger: dict[tuple[int, ...], float] = {}
    for tokens, mass in law.items():
        row = p.copy()
        row[list(tokens) if off else []] = 0.0
        left = row.sum()
        if left <= 0:  # nothing can be drawn off the set
            larger[tokens] = larger.get(tokens, 0.0) + mass
        for token in np.flatnonzero(row):
            key = tuple(sorted({*tokens, int(token)}))
            larger[key] = larger.get(key, 0.0) + mass * row[token] / left
    return larger
