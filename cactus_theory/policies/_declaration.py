"""What a rule says about itself; audits and property tests hold it to its word."""

from dataclasses import dataclass
from typing import Literal

Scope = Literal["emitted", "per proposal"]


@dataclass(frozen=True)
class Budget:
    """A promise that a divergence stays within an amount.

    Attributes
    ----------
    divergence : spec string, such as ``kl``.
    amount : the bound, in the divergence's unit (nats for KL).
    scope : ``emitted`` bounds the law of the token a reader sees; ``per proposal``
        bounds the row built for each drafted token, before averaging over drafts.
    """

    divergence: str
    amount: float
    scope: Scope

    def __str__(self) -> str:
        return f"{self.divergence} <= {self.amount:g} {self.scope}"


@dataclass(frozen=True)
class Declaration:
    """What a rule declares; anything declared is tested.

    Attributes
    ----------
    direction : +1 if acceptance grows with the knob, −1 if it falls, 0 if there is no knob.
    strict : the knob value at which the rule is lossless, or None if it has none.
    budget : the divergence bound it promises, or None.
    between : the emitted law lies pointwise between p and q.
    at_least_speculative : acceptance is never below lossless speculative sampling.
    continuous : acceptance is continuous in the rows.
    support : ``target`` if no token with q = 0 is ever emitted, else ``free``.
    optimal : no rule that keeps the same budget accepts more.
    """

    direction: int = 0
    strict: float | None = None
    budget: Budget | None = None
    between: bool = False
    at_least_speculative: bool = False
    continuous: bool = True
    support: Literal["target", "free"] = "target"
    optimal: bool = False
