"""What a policy claims about itself; audits and property tests check it."""

from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["emitted", "per proposal"]
Support = Literal["target", "free"]
SUPPORTS = get_args(Support)


@dataclass(frozen=True)
class Budget:
    """A claim that a divergence stays within an amount.

    Attributes
    ----------
    divergence : spec string, such as ``kl``.
    amount : the bound, in the divergence's unit (nats for KL).
    scope : ``emitted`` bounds the emitted law; ``per proposal`` bounds the row that each
        drafted token is verified against, before averaging over drafts.

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


@dataclass(frozen=True)
class Declaration:
    """What a policy declares; anything declared is tested.

    Attributes
    ----------
    direction : +1 if acceptance grows with the knob, −1 if it falls, 0 if there is no knob.
    strict : the knob value at which the policy is lossless, or None if there is none.
    budget : the divergence bound it claims, or None.
    between : the emitted law lies pointwise between p and q.
    at_least_speculative : acceptance is never below lossless speculative sampling.
    continuous : acceptance is continuous in the rows.
    support : ``target`` if no token with q = 0 is ever emitted, else ``free``.
    optimal : no policy that keeps the same budget accepts more.

    Examples
    --------
    >>> declared = ct.policy("lenience:lenience=0.5").declares
    >>> declared.direction, declared.strict, declared.budget.divergence
    (-1, 1.0, 'max_divergence')
    """

    direction: int = 0
    strict: float | None = None
    budget: Budget | None = None
    between: bool = False
    at_least_speculative: bool = False
    continuous: bool = True
    support: Support = "target"
    optimal: bool = False
