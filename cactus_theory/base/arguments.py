"""Check arguments: numbers, names, texts. Errors name the argument, its rule and the value given.

Rows and tensors are checked in :mod:`cactus_theory.base.tensors`: nothing here imports torch.
"""

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# largest whole number that an argument may have (int64), as counts are multiplied with floats
MOST_WHOLE = 2**63 - 1


def as_number(name: str, value: Any) -> float:
    """Return ``value``, a number or a number's text, as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: must be a number; got {value!r}") from None


def number(
    name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False
) -> float:
    """Return ``value`` as a float inside [low, high], or inside (low, high] if ``open_low``."""
    result = as_number(name, value)
    inside = low < result <= high if open_low else low <= result <= high
    if not inside:  # NaN lands here too
        bracket = "(" if open_low else "["
        raise ValueError(f"{name}: must lie in {bracket}{low:g}, {high:g}]; got {value!r}")
    return result


def finite(name: str, value: Any, low: float, *, open_low: bool = False) -> float:
    """Return ``value`` as a finite float of at least ``low``, or above ``low`` if ``open_low``."""
    result = number(name, value, low, open_low=open_low)
    if result == math.inf:
        raise ValueError(f"{name}: must be finite; got {value}")
    return result


def the_only_one(**values: Any) -> str:
    """Return the name of the only argument that is given; ValueError for none or several."""
    names = [name for name, value in values.items() if value is not None]
    if len(names) != 1:
        shown = " and ".join(names) or "none of them"
        raise ValueError(f"{', '.join(values)}: exactly one must be given; got {shown}")
    return names[0]


def whole_number(name: str, value: Any, low: int) -> int:
    """Return ``value`` if it is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: must be an integer of at least {low}; got {value!r}")
    if value > MOST_WHOLE:
        raise ValueError(f"{name}: must be below 2^63; got one of {value.bit_length()} bits")
    return value


def as_whole_number(name: str, value: Any, low: int | None = None) -> int:
    """Return a number, or a number's text, as an int of at least ``low``; ValueError for a bool."""
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        raise ValueError(f"{name}: must be below 2^63; got one of {value.bit_length()} bits")
    try:
        number = float(value)
        if abs(number) > MOST_WHOLE:
            raise ValueError
        if isinstance(value, bool) or number != number // 1 or (low is not None and number < low):
            raise ValueError
        # not int(number) of an int: a float loses digits above 2^53
        return int(number if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        least = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name}: must be a whole number{least}; got {value!r:.80}") from None


def threads(value: Any) -> int:
    """Return ``value`` as a number of threads, 1 to 1024; OpenMP fails with millions."""
    number("threads", value, 1, 1024)
    return as_whole_number("threads", value)


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise ValueError for a command-line flag whose value is an empty text."""
    following = [*arguments[1:], "none"]  # nothing follows the last one, which is no empty text
    for flag, value in zip(arguments, following, strict=True):
        if flag.startswith("--") and (value == "" or flag.endswith("=")):
            raise ValueError(f"{flag.removesuffix('=')}: must not be empty; got ''")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is in ``allowed``; else raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}; got {value!r}")
    return value


def optional_module(module: str, extra: str) -> ModuleType:
    """Import ``module``; if it is missing, the error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the missing one is another, which ``module`` imports
        raise ModuleNotFoundError(
            f"{module} is not installed; it comes with the extra {extra!r}: "
            f"pip install 'cactus-theory[{extra}]'",
            name=error.name,
        ) from None
