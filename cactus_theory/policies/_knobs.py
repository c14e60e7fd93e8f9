"""Knobs of a policy: which there are, their values in the type they are annotated with."""

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cactus_theory.base import arguments as check
from cactus_theory.policies._copies import enter
from cactus_theory.policies._policy import Policy

MISSING = dataclasses.MISSING
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Knob:
    """A knob: the type of its values (Any if unknown) and its default (MISSING if required)."""

    kind: Any
    default: Any


def of_class(kind: type[Policy]) -> dict[str, Knob]:
    """Return a dataclass's fields; for other classes keyword parameters, none if it is a policy."""
    if not dataclasses.is_dataclass(kind):
        return {} if issubclass(kind, Policy) else _parameters(kind)
    try:
        kinds = get_type_hints(kind)
    except (NameError, TypeError):  # an annotation that only a type checker can read
        kinds = {}
    knobs = {}
    for entry in dataclasses.fields(kind):
        if not entry.init:  # the class has fixed it
            continue
        factory = entry.default_factory
        default = entry.default if factory is MISSING else factory()
        knobs[entry.name] = Knob(kinds.get(entry.name, type_of(default)), default)
    return knobs


def _parameters(kind: type) -> dict[str, Knob]:
    knobs = {}
    for name, entry in inspect.signature(kind, eval_str=True).parameters.items():
        if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY):
            default = MISSING if entry.default is entry.empty else entry.default
            annotated = entry.annotation is not entry.empty
            knobs[name] = Knob(entry.annotation if annotated else type_of(default), default)
    return knobs


def of(policy: Policy | type[Policy]) -> dict[str, Knob]:
    if isinstance(policy, type):
        return of_class(policy)
    if hasattr(policy, "knobs_of_function"):
        return policy.knobs_of_function()  # type: ignore[attr-defined]
    return of_class(type(policy)) if dataclasses.is_dataclass(policy) else {}


def type_of(default: Any) -> Any:
    """Return the type that a default implies where there is no annotation."""
    if isinstance(default, bool):
        return bool
    if isinstance(default, int):
        return int | float
    return type(default) if isinstance(default, float | str) else Any


def converted(name: str, value: Any, kind: Any) -> Any:
    """Return ``value`` as ``kind``: ``"3"`` as int, ``"true"`` as bool, ``"none"`` as None.

    Numbers become the float or int that is asked for. Values of other kinds (Any, a class of your
    own) are returned as they are. Raises ValueError for a value that ``kind`` cannot hold.
    """
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of(name, value, get_args(kind))
    if get_origin(kind) is Literal:
        return _choice(name, value, get_args(kind))
    if kind in (None, type(None)):
        return _nothing(name, value)
    reader = READERS.get(kind) if isinstance(kind, type) else None
    return value if reader is None else reader(name, value)


def _one_of(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return ``value`` as the first kind that can hold it, None and narrow kinds first."""
    if not isinstance(value, str) and type(value) in kinds:
        return value
    order = [type(None), bool, int, float]
    ranked = sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order))
    last = None
    for kind in ranked:
        try:
            return converted(name, value, kind)
        except ValueError as error:
            last = error
    assert last is not None
    raise last


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    for choice in allowed:
        if value == choice or value == str(choice):
            return choice
    raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}; got {value!r}")


def _nothing(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    raise ValueError(f"{name}: must be none; got {value!r}")


def _yes_or_no(name: str, value: Any) -> bool:
    truth = value if isinstance(value, bool) else WORDS.get(str(value).lower())
    if truth is None:
        raise ValueError(f"{name}: must be true or false; got {value!r}")
    return truth


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: must be a number; got {value!r}") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text; got {value!r}")
    return value


READERS: dict[type, Callable[[str, Any], Any]] = {
    bool: _yes_or_no,
    float: _number,
    int: check.as_whole_number,
    str: _text,
}


def readable(policy: Policy | type[Policy], name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return knob values in their types; ValueError for an unknown knob or a wrong value."""
    known = of(policy)
    for knob in values:
        if knob not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"policy: {name} takes the knobs {allowed}; got {knob!r}")
    return {knob: converted(knob, value, known[knob].kind) for knob, value in values.items()}


def with_knobs(policy: Policy, name: str, values: dict[str, Any]) -> Policy:
    """Return the policy at other values of its knobs; raises as :func:`readable`."""
    if isinstance(policy, Policy):
        enter(policy)
    ready = readable(policy, name, values)
    if not ready:
        return policy
    if hasattr(policy, "with_knobs"):
        return policy.with_knobs(**ready)  # type: ignore[attr-defined]
    return dataclasses.replace(policy, **ready)  # type: ignore[type-var]


def built(kind: type[Policy], name: str, spec: str, values: dict[str, Any]) -> Policy:
    ready = readable(kind, name, values)
    for knob, entry in of_class(kind).items():
        if entry.default is MISSING and knob not in ready:
            raise ValueError(f"policy: {name} needs the knob {knob}; got {spec!r}")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"policy: {name} is abstract; it lacks {', '.join(missing)}")
    policy = kind(**ready)
    if isinstance(policy, Policy):
        enter(policy)
    return policy
