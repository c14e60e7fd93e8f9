"""Define properties (bounds that computed numbers must keep), and measure them on examples.

Each kind of object that is checked (policies, verifiers, the kinds in ``tests/kits``) has a
table :class:`Properties` and a subclass of :class:`Seen`, which computes the numbers on examples.
:func:`broken` checks one object against properties of its kind. Policies are checked by
``_checker.py`` instead, because a user's policy may raise errors.
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

# tolerance of float64 sums of a few dozen terms ≤ 1, and of numerical roots
EXACT = 1e-9
# by how much a row's sum may change when its terms are added in a different order
ROUNDING = 1e-15
# the largest float64 below 1, and so the largest uniform random number ("coin") in [0, 1)
LAST_COIN = 1 - 2.0**-53
# most tokens of a row on which a property is checked by default
WIDEST = 512
# bound for numbers that only have to be finite
FINITE = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Bounds:
    """Numbers and the bounds they must keep: low − allowed ≤ found ≤ high + allowed, by entry.

    Attributes
    ----------
    found : (N, …), the numbers that were computed.
    low, high : bounds on ``found``, of a shape that expands to (N, …); None for no bound.
    about : the name of an entry in messages: a format string for the entry's indices after the
        first, such as ``"acceptance of token {0}"``, or a function of the whole index.
    allowed : tolerance for rounding errors; (N, …) if the tolerance depends on the entry.
    counts : (N, …) bool, the entries to which the property applies; None for all.
    rows : (N,), the example that each index of the first axis belongs to; None if index i belongs
        to example i.

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
        """Return (N, …), how far each number is from breaking its bound; negative if broken."""
        numbers = self.found.double()
        excess = torch.full_like(numbers, -torch.inf)
        for bound, sign in ((self.low, -1.0), (self.high, 1.0)):
            if bound is not None:
                bound = _number(bound).expand(numbers.shape)
                # ∞ keeps a bound of ∞, though ∞ − ∞ is NaN; any other NaN breaks it
                beyond = torch.where(numbers == bound, 0.0, sign * (numbers - bound))
                excess = torch.maximum(excess, torch.where(beyond.isnan(), torch.inf, beyond))
        margins = self.allowed - excess
        return margins if self.counts is None else torch.where(self.counts, margins, torch.inf)

    def describe(self, index: tuple[int, ...]) -> tuple[str, str, str]:
        """Return three texts about one entry: name, allowed numbers, number found."""
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
    """Return a bound as a float64 tensor."""
    return torch.as_tensor(bound, dtype=torch.float64)


class Seen:
    """Numbers that a policy, a verifier, … gives on a batch of examples; properties bound them."""

    width = 0  # V of the rows; a property is skipped on rows wider than its ``widest``

    def shown(self, row: int) -> Iterator[tuple[str, str]]:
        """Yield lines (label, text) that show the example ``row`` in the message of a failure."""
        yield from ()

    def again(self, row: int, name: str) -> str:
        """Return a Python call that checks the property ``name`` on the example ``row`` again."""
        return ""


Measure = TypeVar("Measure", bound=Callable[[Any], Iterator[Bounds]])


def always(thing: Any) -> bool:
    """Return True: the property applies to every object of its kind."""
    return True


@dataclass(frozen=True)
class Property:
    """A property that policies, verifiers or objects of another kind must have.

    Attributes
    ----------
    name : name of the property in reports and in ``properties=``.
    statement : the sentence that must be true, from the first paragraph of a docstring.
    applies : function of the checked object: whether the object must have the property.
    measure : function of a :class:`Seen` that yields the :class:`Bounds` to keep.
    hint : the likeliest cause of a failure, in words.
    steady : whether policies with jumps (``continuous=False``) are judged away from jumps only.
    at_other_knobs : whether the property is also checked at further values of a policy's knob.
    widest : largest V on which the property is checked; on wider rows its enumeration is too slow.
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
    """All properties of one kind of object, by name, in the order in which they are checked."""

    def __init__(self, decorator: str) -> None:
        super().__init__()
        self.decorator = decorator  # name of the registering decorator, for error messages

    def register(
        self, applies: Callable[[Any], bool] = always, **options: Any
    ) -> Callable[[Measure], Measure]:
        """Return a decorator that makes a function a property, stated in its docstring."""
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
        """Return the named properties (all if ``names`` is None); ValueError for unknown names."""
        return [
            self[check.one_of(argument, name, tuple(self))]
            for name in (self if names is None else names)
        ]


@dataclass
class Worst:
    """The entry of a batch that is closest to breaking its bound, or breaks the bound most.

    ``margin`` is the distance to the bound, negative if broken, ∞ if there is no entry; ``counted``
    is the number of examples of the batch that were measured.
    """

    margin: float = math.inf
    row: int = 0
    about: str = ""
    expected: str = ""
    found: str = ""
    counted: int = 0


def measure(prop: Property, seen: Seen) -> Worst:
    """Return the entry of a batch that is closest to breaking its bound, or breaks it most.

    Errors that the checked object raises pass through.
    """
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
            # numpy's unravel_index, because torch's takes a second to import on its first call
            place = np.unravel_index(int(margins.argmin()), tuple(margins.shape))
            index = tuple(int(i) for i in place)
            worst = Worst(float(margins.min()), int(owners[index[0]]), *bounds.describe(index))
        if worst.margin < 0:  # the first bounds of a property are the easiest to understand
            break
    worst.counted = len(counted)
    return worst


def finding(
    prop: Property, worst: Worst, rows: tuple[list[float], list[float]] = ([], []), **more: Any
) -> Finding:
    """Return the finding for a property that ``rows`` (target, draft) break.

    ``more`` sets further fields of the finding.
    """
    numbers = worst.about, worst.expected, worst.found, worst.margin
    return Finding(prop.name, prop.statement, *rows, *numbers, **more)


def broken(thing: str, examples: Iterable[Seen], properties: Iterable[Property]) -> str:
    """Return a message about the first broken property of ``thing``, or an empty text if all hold.

    ``examples`` come smallest first, so that the message shows the smallest failing example.
    """
    chosen = list(properties)
    for seen in examples:
        for prop in chosen:
            worst = measure(prop, seen)
            if worst.margin < 0:
                again = seen.again(worst.row, prop.name)
                fault = finding(prop, worst, hint=prop.hint, again=again)
                return message(thing, fault, seen.shown(worst.row))
    return ""
