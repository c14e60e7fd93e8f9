"""What a property is: bounds on numbers that a policy produces, and when it has to hold."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.testing.laws._behaviour import Behaviour

# sums of a few dozen float64 terms, each at most 1, and roots solved to that accuracy
EXACT = 1e-9
# what the order of the terms may change of a sum over a row
ROUNDING = 1e-15
# the widest row that a property is checked on by default
WIDEST = 512
# as wide as real vocabularies, for properties that cost O(V) a drafted token
REAL = 200_000
# bounds for numbers that only have to be finite
FINITE = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Bounds:
    """low − allowed ≤ found ≤ high + allowed, entry by entry.

    Attributes
    ----------
    found : (N, …) numbers of the rule. ``low``, ``high`` : what they must lie between.
    about : what one number is: a text with places for its indices after the first, such as
        ``"acceptance of token {0}"``, or a function of the whole index.
    allowed : what rounding may add; (N, …) if that depends on the entry.
    counts : (N, …) bool, the entries to which the property applies; None for all.
    rows : (N,) the row that each entry of the first axis is about; None if N counts the rows.

    Examples
    --------
    >>> found = Bounds(torch.tensor([[0.5, 1.25]]), 0, 1, "acceptance of token {0}")
    >>> found.margins()
    tensor([[ 0.5000, -0.2500]], dtype=torch.float64)
    >>> found.describe((0, 1))
    ('acceptance of token 1', 'between 0 and 1', '1.25')
    """

    found: Tensor
    low: Any
    high: Any
    about: str | Callable[[tuple[int, ...]], str]
    allowed: float | Tensor = EXACT
    counts: Tensor | None = None
    rows: Tensor | None = None

    def margins(self) -> Tensor:
        """Return (N, …) how far each number is from breaking the property, negative if broken."""
        found = self.found.double()
        excess = torch.full_like(found, -torch.inf)
        for bound, sign in ((self.low, -1.0), (self.high, 1.0)):
            if bound is not None:
                bound = _number(bound).expand(found.shape)
                beyond = torch.where(found == bound, 0.0, sign * (found - bound))
                excess = torch.maximum(excess, torch.where(beyond.isnan(), torch.inf, beyond))
        margins = self.allowed - excess
        return margins if self.counts is None else torch.where(self.counts, margins, torch.inf)

    def describe(self, index: tuple[int, ...]) -> tuple[str, str, str]:
        """Return (about, expected, found) of one entry, as text."""
        about = self.about(index) if callable(self.about) else self.about.format(*index[1:])
        low, high = (
            None if b is None else float(_number(b).expand(self.found.shape)[index])
            for b in (self.low, self.high)
        )
        if high == FINITE:
            expected = "a finite number"
        elif low is not None and low == high:
            expected = text(low)
        elif low is None or high is None:
            expected = f"at most {text(high)}" if low is None else f"at least {text(low)}"
        else:
            expected = f"between {text(low)} and {text(high)}"
        return about, expected, text(float(self.found[index]))


def _number(bound: Any) -> Tensor:
    return torch.as_tensor(bound, dtype=torch.float64)


def text(number: float | None) -> str:
    """Return a number to ten digits."""
    if number is None:
        return "none"
    return f"{number:.10g}"


@dataclass(frozen=True)
class Law:
    """One property of policies.

    Attributes
    ----------
    name : its name in reports and in ``laws=``.
    statement : the first paragraph of its docstring.
    applies : whether a policy has to have it (always, or because it declares so).
    measure : a policy's behaviour on rows → the bounds it has to keep.
    hint : the likeliest cause of a failure, in words.
    steady : whether policies with jumps (``continuous=False``) are judged away from them only.
    at_other_knobs : whether it is also checked at other values of the knob.
    widest : the largest vocabulary it is checked on; enumerating more is too slow.

    Examples
    --------
    >>> PROPERTIES["answers"].statement
    'Every call returns finite numbers of the right shape, in time.'
    """

    name: str
    statement: str
    applies: Callable[[Policy], bool]
    measure: Callable[[Behaviour], Iterator[Bounds]]
    hint: str = ""
    steady: bool = False
    at_other_knobs: bool = True
    widest: int = WIDEST


LAWS: dict[str, Law] = {}
Measure = Callable[[Behaviour], Iterator[Bounds]]


def always(rule: Policy) -> bool:
    """Return True: every policy must have the property."""
    return True


def law(
    applies: Callable[[Policy], bool] = always,
    *,
    hint: str = "",
    steady: bool = False,
    at_other_knobs: bool = True,
    widest: int = WIDEST,
) -> Callable[[Measure], Measure]:
    """Register a function as a property; its docstring is the statement.

    The function takes a :class:`Behaviour` and yields :class:`Bounds`; the options are the
    fields of :class:`Law`. Every check, test suite and page picks it up by its name.

    Raises
    ------
    TypeError, ValueError
        Used without parentheses; a function without a docstring, or a name that is taken.

    Examples
    --------
    >>> @policy_property(hint="the row is not sorted")
    ... def keeps_the_likeliest(seen):
    ...     "The target's likeliest token is always kept."
    ...     best = seen.q.argmax(-1, keepdim=True)
    ...     yield Bounds(seen.phi.gather(-1, best), 1, 1, "acceptance of the likeliest token")
    >>> "keeps_the_likeliest" in PROPERTIES
    True
    """
    if inspect.isgeneratorfunction(applies):
        raise TypeError(f"law: must be used with parentheses, @law(); got @law on {applies}")

    def enter(function: Measure) -> Measure:
        lines = (function.__doc__ or "").strip().split("\n\n")[0]
        statement = " ".join(lines.replace("``", "").split())
        name = function.__name__
        if not statement:
            raise ValueError(f"law: {name} needs a docstring that says what must hold; got none")
        if name in LAWS and LAWS[name].measure.__module__ != function.__module__:
            raise ValueError(f"law: must not be registered already; got {name!r}")
        LAWS[name] = Law(name, statement, applies, function, hint, steady, at_other_knobs, widest)
        return function

    return enter
