"""What a law is: bounds on numbers that a rule produces, and when it has to hold."""

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
# bounds for what only has to be a number
FINITE = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Bounds:
    """low − allowed ≤ found ≤ high + allowed, entry by entry.

    Attributes
    ----------
    found : (N, …) numbers of the rule. ``low``, ``high`` : what they must lie between.
    about : what one number is, given its index behind the first: ``"acceptance of token {0}"``,
        or a function of the whole index.
    allowed : what rounding may add; (N, …) if that depends on the entry.
    counts : (N, …) bool, the entries that the law speaks of; None for all.
    rows : (N,) the row that each entry of the first axis is about; None if N counts the rows.
    """

    found: Tensor
    low: Any
    high: Any
    about: str | Callable[[tuple[int, ...]], str]
    allowed: float | Tensor = EXACT
    counts: Tensor | None = None
    rows: Tensor | None = None

    def margins(self) -> Tensor:
        """Return (N, …) how far each number is from breaking the law, negative if broken."""
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
    """One property of rules.

    Attributes
    ----------
    name : how reports and ``laws=`` call it.
    statement : what it says, the first paragraph of its docstring.
    applies : whether a rule has to obey it (always, or because it declares so).
    measure : a rule's behaviour on rows → the bounds it has to keep.
    """

    name: str
    statement: str
    applies: Callable[[Policy], bool]
    measure: Callable[[Behaviour], Iterator[Bounds]]


LAWS: dict[str, Law] = {}


def law(
    applies: Callable[[Policy], bool] = lambda rule: True,
) -> Callable[[Callable[[Behaviour], Iterator[Bounds]]], Callable[[Behaviour], Iterator[Bounds]]]:
    """Enter a function into the list of laws; its docstring is the statement."""

    def enter(
        function: Callable[[Behaviour], Iterator[Bounds]],
    ) -> Callable[[Behaviour], Iterator[Bounds]]:
        lines = (function.__doc__ or "").strip().split("\n\n")[0]
        statement = " ".join(lines.replace("``", "").split())
        name = function.__name__
        LAWS[name] = Law(name, statement, applies, function)
        return function

    return enter
