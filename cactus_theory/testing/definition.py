"""Define a property, bounds on numbers of a thing seen on examples, and measure it.

A kind of thing that is checked (policies, verifiers, and those of ``tests/kits``) is a table of
:class:`Properties` and a subclass of :class:`Seen` for its examples; :func:`broken` does the rest.
Policies may come from a user: see ``_check_properties.py``.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.testing.report import Finding, message

# tolerance of float64 sums of a few dozen terms ≤ 1, and of roots
EXACT = 1e-9
# tolerance of a row's sum in another order of its terms
ROUNDING = 1e-15
# the largest float64 below 1, the last value a coin can take
LAST_COIN = 1 - 2.0**-53
# the widest row that a property is checked on by default
WIDEST = 512
# bound for numbers that only have to be finite
FINITE = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Bounds:
    """low − allowed ≤ found ≤ high + allowed, entry by entry.

    Attributes
    ----------
    found : (N, …) numbers of the rule. ``low``, ``high`` : bounds on them.
    about : the name of one number: a text with places for its indices after the first, such as
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
        numbers = self.found.double()
        excess = torch.full_like(numbers, -torch.inf)
        for bound, sign in ((self.low, -1.0), (self.high, 1.0)):
            if bound is not None:
                bound = _number(bound).expand(numbers.shape)
                beyond = torch.where(numbers == bound, 0.0, sign * (numbers - bound))
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
        elif low is None or high is None:
            expected = f"at most {high:.10g}" if low is None else f"at least {low:.10g}"
        else:
            expected = f"{low:.10g}" if low == high else f"between {low:.10g} and {high:.10g}"
        return about, expected, f"{float(self.found[index]):.10g}"


def _number(bound: Any) -> Tensor:
    return torch.as_tensor(bound, dtype=torch.float64)


class Seen:
    """Numbers of a policy, a verifier, … on some examples, for its properties to bound."""

    width = 0  # tokens of a row; a property is skipped beyond its ``widest``

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        """Yield lines (label, text) that show one example in the message of a failure."""
        yield from ()

    def again(self, row: int, name: str) -> str:
        """Return the call that checks this example for one property again."""
        return ""


Measure = TypeVar("Measure", bound=Callable[[Any], Iterator[Bounds]])


def always(thing: Any) -> bool:
    """Return True: the property holds for all things of a kind."""
    return True


@dataclass(frozen=True)
class Property:
    """A property of policies, of verifiers, or of another kind.

    Attributes
    ----------
    name : its name in reports and in ``properties=``.
    statement : the first paragraph of its docstring.
    applies : whether a policy, a verifier, … has to have it (always, or because it says so).
    measure : a :class:`Seen` → the bounds that its numbers must keep.
    hint : the likeliest cause of a failure, in words.
    steady : whether policies with jumps (``continuous=False``) are judged away from them only.
    at_other_knobs : whether it is also checked at other values of a policy's knob.
    widest : the largest vocabulary it is checked on; enumerating more is too slow.
    """

    name: str
    statement: str
    applies: Callable[[Any], bool]
    measure: Callable[[Any], Iterator[Bounds]]
    hint: str = ""
    steady: bool = False
    at_other_knobs: bool = True
    widest: int = WIDEST


class Properties(dict[str, Property]):
    """The properties of one kind, by name, in the order in which they are checked."""

    def __init__(self, decorator: str) -> None:
        super().__init__()
        self.decorator = decorator  # name of the decorator in error messages

    def register(
        self, applies: Callable[[Any], bool] = always, **options: Any
    ) -> Callable[[Measure], Measure]:
        """Register a function as a property; its docstring states it, ``options`` the rest."""
        if inspect.isgeneratorfunction(applies):
            raise TypeError(
                f"{self.decorator}: must be used with parentheses, @{self.decorator}(); "
                f"got @{self.decorator} on {applies}"
            )

        def add(function: Measure) -> Measure:
            name = function.__name__
            lines = (function.__doc__ or "").strip().split("\n\n")[0]
            statement = " ".join(lines.replace("``", "").split())
            if not statement:
                raise ValueError(
                    f"{self.decorator}: {name} needs a docstring that says what must hold; got none"
                )
            if name in self and self[name].measure.__module__ != function.__module__:
                raise ValueError(f"{self.decorator}: must not be registered already; got {name!r}")
            self[name] = Property(name, statement, applies, function, **options)
            return function

        return add

    def chosen(self, argument: str, names: Any = None) -> list[Property]:
        """Return the named properties, all of them for None; raise ValueError for a wrong name."""
        return [
            self[check.one_of(argument, name, tuple(self))]
            for name in (self if names is None else names)
        ]


@dataclass
class Worst:
    """The entry with the smallest margin among some rows."""

    margin: float = math.inf
    row: int = 0
    about: str = ""
    expected: str = ""
    found: str = ""
    counted: int = 0


def measure(prop: Property, seen: Seen) -> Worst:
    """Return the worst entry of a property on a batch; foreign exceptions pass through."""
    worst, counted = Worst(), set()
    if seen.width > prop.widest:
        return worst
    for bounds in prop.measure(seen):
        margins = bounds.margins()
        if not margins.numel():
            continue
        owners = torch.arange(len(margins)) if bounds.rows is None else bounds.rows
        used = slice(None)
        if bounds.counts is not None:
            used = bounds.counts.reshape(len(margins), -1).any(-1)
        counted |= set(owners[used].tolist())
        if float(margins.min()) < worst.margin:
            # numpy's unravel_index, as the first call of torch's imports for a second
            place = np.unravel_index(int(margins.argmin()), tuple(margins.shape))
            index = tuple(int(i) for i in place)
            worst = Worst(float(margins.min()), int(owners[index[0]]), *bounds.describe(index))
        if worst.margin < 0:  # a property's first bounds are the easiest to understand
            break
    worst.counted = len(counted)
    return worst


def finding(
    prop: Property, worst: Worst, rows: tuple[list[float], list[float]] = ([], []), **more: Any
) -> Finding:
    """Return the finding for a broken property; ``more`` are its last fields."""
    numbers = worst.about, worst.expected, worst.found, worst.margin
    return Finding(prop.name, prop.statement, *rows, *numbers, **more)


def broken(thing: str, examples: Iterable[Seen], properties: Iterable[Property]) -> str:
    """Return the message of the first broken property, empty if all hold."""
    chosen = list(properties)
    for seen in examples:  # in the order of their size: the first that fails is the smallest
        for prop in chosen:
            worst = measure(prop, seen)
            if worst.margin < 0:
                again = seen.again(worst.row, prop.name)
                fault = finding(prop, worst, hint=prop.hint, again=again)
                return message(thing, fault, seen.shown(worst.row))
    return ""
