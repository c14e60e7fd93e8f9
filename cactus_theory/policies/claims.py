"""The claims that a policy declares: a budget of divergence, and properties. Tests check them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor

from cactus_theory.base import arguments as check

Scope = Literal["emitted", "per proposal"]
Support = Literal["target", "free"]
# tolerance of a budget for the rounding of a sum over the vocabulary, absolute up to an amount of
# 1 and relative above, and the largest amount up to which the tolerance grows
BUDGET_TOLERANCE, LARGEST = 1e-9, 1e9


@dataclass(frozen=True)
class Budget:
    """A policy's claim that a divergence from the target's row q is at most ``amount``.

    Attributes
    ----------
    divergence : spec string, such as ``kl``.
    amount : the bound, in the divergence's unit (nats for KL).
    scope : ``emitted`` bounds the divergence of the emitted law; ``per proposal`` bounds the
        divergence of each row that a drafted token is verified against, for every drafted token.

    Examples
    --------
    >>> ct.policy("cactus:delta=0.25").declares.budget
    Budget(divergence='kl', amount=0.25, scope='per proposal')
    """

    divergence: str
    amount: float
    scope: Scope

    def __str__(self) -> str:
        return f"{self.divergence} <= {self.amount:g} {self.scope}"

    @classmethod
    def read(cls, text: str, knobs: Mapping[str, Any]) -> "Budget":
        """Read a budget such as ``"kl <= delta emitted"``; ``knobs`` has the value of ``delta``."""
        divergence, sign, rest = text.partition("<=")
        amount, _, scope = rest.strip().partition(" ")
        if not sign or not scope:
            raise ValueError(
                'budget: must read like "kl <= 0.1 emitted" or "kl <= delta per proposal"; '
                f"got {text!r}"
            )
        value, bounded_scope = check.number("budget", knobs.get(amount, amount), 0), scope.strip()
        check.one_of("budget", bounded_scope, get_args(Scope))
        return cls(divergence.strip(), value, cast(Scope, bounded_scope))

    @property
    def rounding(self) -> float:
        """Return the tolerance above ``amount`` for rounding errors, in the divergence's unit."""
        return BUDGET_TOLERANCE * (1 + min(self.amount, LARGEST))

    def held(self, spent: Tensor) -> Tensor:
        """Return whether each divergence is within the budget, up to rounding; False for NaN."""
        return spent <= self.amount + self.rounding

    def bounds(self, stated: bool, token: str = "a token") -> str:
        """Return in words what is bounded; ``stated`` is whether the policy is ``PerProposal``."""
        if self.scope == "emitted":
            return f"{self.divergence} of the emitted law"
        if stated:
            return f"{self.divergence} of the proposal of {token}"
        return f"least {self.divergence} of a row that accepts {token} so often"


@dataclass(frozen=True)
class Declaration:
    """The claims that a policy declares; tests and audits check every claim.

    Attributes
    ----------
    direction : +1 if acceptance grows with the knob, −1 if acceptance falls, 0 without a knob.
    strict : the knob value at which the policy is lossless, or None if there is none.
    budget : the bound on a divergence that the policy claims to keep, or None.
    between : the emitted law lies pointwise between p and q.
    at_least_speculative : acceptance is never below lossless speculative sampling.
    continuous : acceptance is continuous in the rows.
    support : ``target`` if no token with q = 0 is ever emitted, else ``free``.
    optimal : no policy that keeps the same budget accepts more.
    floored : ids of tokens that are emitted with at least their probability under the target.
    held : ids of tokens that are emitted with exactly their probability under the target.

    Examples
    --------
    >>> declared = ct.policy("lenience:lenience=0.5").declares
    >>> declared.direction, declared.strict, declared.budget.divergence
    (-1, 1.0, 'max_divergence')
    """

    direction: Literal[-1, 0, 1] = 0
    strict: float | None = None
    budget: Budget | None = None
    between: bool = False
    at_least_speculative: bool = False
    continuous: bool = True
    support: Support = "target"
    optimal: bool = False
    floored: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
