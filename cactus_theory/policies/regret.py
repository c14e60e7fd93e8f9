"""Relaxed greedy decoding at temperature 0, with regret in nats as the charge of a token."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.tensors import ungraphed
from cactus_theory.divergences.regret import REGRET, regrets
from cactus_theory.optimum.regret import (
    OneTokenRow,
    RegretPath,
    completed,
    first_argmax,
    kept_at,
    kept_within,
)
from cactus_theory.policies._base_classes import FixedTarget
from cactus_theory.policies.claims import Declaration
from cactus_theory.policies.knob_values import NotNegative
from cactus_theory.policies.policy import PathState, Rows
from cactus_theory.policies.registry import register


@register("regret")
@dataclass(frozen=True)
class Regret(FixedTarget):
    r"""Keep a drafted token if q_n is close to max q, else emit the target's likeliest token.

    The policy is for temperature 0; its q is the target's row at temperature 1. The regret of a
    token is ρ_n = max ln q − ln q_n in nats. Source: THEORY.md, Theorem 30.

    Parameters
    ----------
    price : ν, in tokens per nat of regret. A token is kept iff ν ρ_n ≤ 1; in a block the first m
        tokens are kept, with the m that maximises m − ν Σ ρ over them. ∞ is strict greedy decoding.
    delta : instead of ``price``, the mean regret that a row may spend. Drafted tokens are kept in
        the order of rising regret until the budget is spent; the token at which the budget runs
        out is kept with the probability that the budget allows.
    """

    price: NotNegative | None = None
    delta: NotNegative | None = None

    unit = REGRET

    def __post_init__(self) -> None:
        super().__post_init__()
        check.the_only_one(price=self.price, delta=self.delta)

    @property
    def knob(self) -> str:  # type: ignore[override]
        """Return the knob in use, price or delta."""
        return "price" if self.delta is None else "delta"

    @cached_property
    def look_ahead(self) -> RegretPath | None:  # type: ignore[override]
        """Return the solver of blocks of deterministic drafts at a price; None with ``delta``."""
        return None if self.price is None else RegretPath(self.price)

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return h: the drafted mass that is kept, and all other mass on the first argmax of q."""
        if path is not None and path.raised is not None and self.look_ahead is not None:
            return self.look_ahead.law(q, p, path.raised)
        lost, drafted = regrets(q), torch.where(q > 0, p.double(), 0.0)
        if self.delta is None:
            assert self.price is not None  # one of the two is given
            kept = kept_at(lost, drafted, self.price)
        else:
            _, kept = kept_within(lost, drafted, torch.full_like(lost[..., :1], self.delta))
        return completed(kept, q)

    def row(self, q: Any, p: Any, alive: float = 1.0) -> OneTokenRow | None:
        """Return the row h for a deterministic draft at a price; None where ``target`` gives h."""
        token, path = int(p.argmax()), self.look_ahead
        # the sum may be 1 although other tokens have a mass: 1 + 1e-307 is 1
        if path is None or p[token] != 1 or (p > 0).sum() != 1:
            return None
        kept = path.row(q, token, raised=1.0, alive=alive)
        # the likeliest token has no regret; at a price of ∞ the product would be NaN
        if kept is None or kept.token == kept.best or path.price * kept.charge.spent <= 1:
            return kept
        return path.row(q, token, raised=0.0, alive=alive)

    def undrafted(self, q: Rows) -> Rows:
        """Return the one-hot row of the first argmax of q."""
        return first_argmax(ungraphed(q))

    @property
    def declares(self) -> Declaration:
        """Return: no bound on a divergence; with delta: mean regret per position at most delta."""
        direction = -1 if self.delta is None else 1
        return Declaration(direction, continuous=False)
