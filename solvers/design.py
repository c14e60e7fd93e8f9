r"""Design a row under constraints of your own, on top of the optimal program.

.. math:: \max_h Σ_i \min(p_i, h_i) \;\text{ s.t. }\; h \in Δ,\; h ≪ q,\;\text{your constraints}

>>> from solvers.design import Design
>>> import numpy as np
>>> q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
>>> row = Design(q, p).budget("kl", 0.1).cap(1.5).solve()
>>> round(float(row.target[2]), 6)
0.3

Any number of divergences, protected tokens, floors, caps on the ratio h/q, expectations,
and cvxpy constraints over named quantities. No answer is returned without a proof: the row
must keep every constraint within 1e-7 and meet a bound from the solver's own multipliers.
With one smooth budget and none of cvxpy's constraints, a row of more than 5,000 tokens is
solved from its dual in a moment; a conic solver follows where that fails.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.divergences import Divergence

from . import _design, _program
from ._constraints import (
    BudgetConstraint,
    Constraint,
    CustomConstraint,
    Dual,
    ExpectationConstraint,
    LimitConstraint,
    Quantities,
)

Infeasible = _design.Infeasible
Tokens = int | Iterable[int]


@dataclass(frozen=True)
class DesignedRow:
    """A solved design.

    ``duals`` are by constraint the acceptance that one unit of room buys: of a higher budget, cap
    or ``at_most``, of a lower floor or ``at_least``. By token for limits, in probability. 0 where
    the row is further than 1e-4 from the limit (relative to it), and below 1e-6 of the largest:
    there a solver's dual values are noise. ``proof`` is ``dual bound``, or ``two
    scalings`` where a constraint has no tangent at the optimum: then two solves in differently
    scaled variables agree, and bound is that agreement.
    """

    target: np.ndarray  # (V,) float64, the row h to verify against instead of q
    acceptance: float  # Σ min(p, h)
    lossless: float  # Σ min(p, q), for comparison
    slacks: dict[str, float]  # how far each is from binding; its most binding token for limits
    duals: dict[str, Dual]
    bound: float  # proven upper bound on the acceptance
    gap: float  # bound minus acceptance
    proof: str
    solver: str
    status: str
    seconds: float  # wall time

    def report(self) -> str:
        """Return what was found in a few lines of plain text."""
        lines = [
            f"acceptance  {self.acceptance:.9g}   (lossless {self.lossless:.9g})",
            f"proof       {self.proof}, {self.bound:.9g} at most; gap {self.gap:.1e}",
            f"solver      {self.solver}, {self.status}, {self.seconds:.3f} s",
        ]
        width = max((len(name) for name in self.slacks), default=0)
        for name, slack in self.slacks.items():
            binds = any(_design.prices_of(self.duals[name]))
            state = "binds" if binds else f"slack {slack:.4g}"
            lines.append(f"constraint  {name:<{width}}  {state:<16}  {_priced(self.duals[name])}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Design:
    """A target row, a draft row and the constraints so far; every method returns a new design.

    Parameters
    ----------
    target_probs, draft_probs : (V,) probabilities q and p of one dtype.

    Raises
    ------
    ValueError, TypeError
        Not a pair of rows, an unknown divergence, a token or a number out of range, a name
        that is taken: each method checks what it is given.
    """

    target_probs: Any
    draft_probs: Any
    rules: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        q, p = _program.one_pair(self.target_probs, self.draft_probs)
        object.__setattr__(self, "target_probs", q)
        object.__setattr__(self, "draft_probs", p)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """Return the constraints so far; ``rules`` is the older name of the same."""
        return self.rules

    def budget(self, divergence: str | Divergence, delta: float) -> "Design":
        """Add D(h‖q) ≤ delta, in the divergence's unit (nats for KL)."""
        kind, amount = _program.checked_budget(divergence, delta)
        return self._with(BudgetConstraint(f"budget {kind.spec}", kind, amount))

    def protect(self, tokens: Tokens, name: str = "protect") -> "Design":
        """Add h ≤ q on ``tokens``: they are never emitted more often than by the target."""
        ids = self._tokens(tokens)
        return self._with(LimitConstraint(name, ids, self.target_probs[ids], 1))

    def cap(self, ratio: float, tokens: Tokens | None = None, name: str | None = None) -> "Design":
        """Add h ≤ ratio · q on ``tokens`` or everywhere."""
        ratio = check.number("ratio", ratio, 0.0)
        ids = np.arange(len(self.target_probs)) if tokens is None else self._tokens(tokens)
        name = name or ("cap" if tokens is None else f"cap {','.join(map(str, ids))}")
        limits = np.minimum(ratio * self.target_probs[ids], 1.0)
        return self._with(LimitConstraint(name, ids, limits, 1))

    def floor(self, floors: Mapping[int, float]) -> "Design":
        """Add h ≥ floors[token] for each token, each a constraint of its own."""
        design = self
        for token, value in floors.items():
            ids, least = self._tokens(token), check.number(f"floor {token}", value, 0.0, 1.0)
            if least > 0 and self.target_probs[ids[0]] == 0:
                raise ValueError(
                    f"floor {token}: must be 0 where the target is 0, as h is; got {value!r}"
                )
            design = design._with(LimitConstraint(f"floor {token}", ids, np.array([least]), -1))
        return design

    def expect(
        self,
        values: Any,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        name: str = "expectation",
    ) -> "Design":
        """Add Σ values·h ≤ at_most, or ≥ at_least; ``values`` (V,) may have any sign."""
        if (at_most is None) == (at_least is None):
            raise ValueError(f"{name}: exactly one of at_most and at_least must be given")
        row = np.asarray(values, dtype=np.float64)
        if row.shape != self.target_probs.shape or not np.isfinite(row).all():
            raise ValueError(
                f"{name}: values must be {len(self.target_probs)} finite numbers; "
                f"got shape {row.shape}"
            )
        sign, limit = (1, at_most) if at_least is None else (-1, at_least)
        limit = check.number(name, limit, -np.inf)
        return self._with(ExpectationConstraint(name, sign * row, sign * limit))

    def require(self, name: str, make: Callable[[Quantities], Any]) -> "Design":
        """Add the cvxpy constraints that ``make`` returns, given the named quantities.

        ``make`` gets ``h``, ``q``, ``p``, ``ratio``, ``accepted``, ``acceptance``,
        ``rejection`` and ``divergence(spec)``; it returns convex ≤, ≥ or == constraints, one
        or a list: ``lambda v: v.divergence("kl") + v.rejection <= 0.4``.
        """
        return self._with(CustomConstraint(name, make))

    def solve(self) -> DesignedRow:
        """Maximise acceptance within the constraints.

        Raises
        ------
        Infeasible
            A ValueError: no row keeps all constraints; ``constraints`` names a set of them in
            conflict, none of which can be left out.
        SolverGaveUp, ModuleNotFoundError
            No answer passed its own check (a RuntimeError); cvxpy is missing.
        """
        return DesignedRow(**_design.solve(self.target_probs, self.draft_probs, self.rules))

    def _with(self, constraint: Constraint) -> "Design":
        if any(constraint.name == other.name for other in self.rules):
            raise ValueError(f"rules: must have names of their own; got {constraint.name!r} twice")
        design = copy.copy(self)  # the rows are checked and normalised once
        object.__setattr__(design, "rules", (*self.rules, constraint))
        return design

    def _tokens(self, tokens: Tokens) -> np.ndarray:
        several = list(tokens) if isinstance(tokens, Iterable) else [tokens]
        size = len(self.target_probs)
        ids = [_program.token_index(token, size) for token in several]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"tokens: must be distinct and at least one; got {tokens!r}")
        return np.array(ids)


def _priced(dual: Dual) -> str:
    if not isinstance(dual, dict):
        return f"price {dual:.6g}"
    prices = {token: price for token, price in dual.items() if price}
    top = sorted(prices, key=prices.__getitem__, reverse=True)[:4]
    shown = ", ".join(f"{prices[token]:.4g} at {token}" for token in top)
    more = f" and {len(prices) - len(top)} more" if len(prices) > len(top) else ""
    return f"price {shown}{more}" if prices else "price 0"
