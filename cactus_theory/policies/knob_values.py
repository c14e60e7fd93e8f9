"""Convert the values of a policy's knobs to the types that the policy's fields are annotated with.

The values come from specs, command lines, data files and keyword arguments.
"""

import inspect
import types
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cactus_theory.base import arguments as check
from cactus_theory.divergences.definition import known_divergence

MISSING = inspect.Parameter.empty
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

# annotations of knobs with a range: a type, and the function that checks a value of this type
NotNegative = Annotated[float, partial(check.number, low=0)]
Share = Annotated[float, partial(check.number, low=0, high=1)]
PositiveShare = Annotated[float, partial(check.number, low=0, high=1, open_low=True)]
Count = Annotated[int, partial(check.as_whole_number, low=1)]


@lru_cache(maxsize=256)
def of(kind: Any) -> dict[str, inspect.Parameter]:
    """Return by name the parameters that a class or a function accepts by keyword.

    ``annotation`` of a returned parameter is the type of its values. If the signature has none, the
    type follows from ``default``, or is Any.
    """
    try:
        signature = inspect.signature(kind, eval_str=True)
    except (NameError, TypeError, SyntaxError):  # text that only a type checker can read
        signature = inspect.signature(kind)
    knobs: dict[str, inspect.Parameter] = {}
    for name, entry in signature.parameters.items():
        if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY):
            if entry.annotation is MISSING or isinstance(entry.annotation, str):
                entry = entry.replace(annotation=_type_of(entry.default))
            knobs[name] = entry
    return knobs


def read(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` converted to the types in ``kind``; ValueError if one does not fit."""
    known = of(kind)
    return {name: converted(name, value, known[name].annotation) for name, value in values.items()}


def _type_of(default: Any) -> Any:
    """Return the type of a parameter without an annotation, from its default value."""
    if isinstance(default, int) and not isinstance(default, bool):
        return int | float
    return type(default) if isinstance(default, bool | float | str) else Any


def converted(name: str, value: Any, kind: Any) -> Any:
    """Return ``value`` as ``kind``: ``"3"`` as int, ``"true"`` as bool, ``"none"`` as None.

    Numbers become floats or ints, as ``kind`` says. Values of other kinds (Any, a class of your
    own) are returned unchanged. Raises ValueError for a value that ``kind`` cannot hold.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(name, value, parts)
    if origin is Annotated:
        return parts[1](name, converted(name, value, parts[0]))
    if origin is Literal:
        return _choice(name, value, parts)
    reader = READERS.get(kind) if isinstance(kind, type) else None
    return value if reader is None else reader(name, value)


def _one_of(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return ``value`` as the first of ``kinds`` that can hold it; None is tried first."""
    if not isinstance(value, str) and type(value) in kinds:
        return value
    if types.NoneType in kinds and str(value).lower() == "none":
        return None
    *first, last = (kind for kind in kinds if kind is not types.NoneType)
    for kind in first:
        try:
            return converted(name, value, kind)
        except ValueError:
            continue
    return converted(name, value, last)


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    for choice in allowed:
        if value == choice or value == str(choice):
            return choice
    raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}; got {value!r}")


def _yes_or_no(name: str, value: Any) -> bool:
    truth = value if isinstance(value, bool) else WORDS.get(str(value).lower())
    if truth is None:
        raise ValueError(f"{name}: must be true or false; got {value!r}")
    return truth


def _spec(name: str, value: str) -> str:
    return known_divergence(value).spec


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text; got {value!r}")
    return value


DivergenceSpec = Annotated[str, _spec]
READERS: dict[type, Callable[[str, Any], Any]] = {
    bool: _yes_or_no,
    float: check.as_number,
    int: check.as_whole_number,
    str: _text,
}
