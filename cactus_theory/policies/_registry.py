"""The one list of rules: name and knobs to policy."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from cactus_theory import _arguments as check
from cactus_theory.policies._base import Policy

Kind = TypeVar("Kind", bound=type[Policy])
_REGISTRY: dict[str, type[Policy]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a policy class available to ``ct.policy``, the command line and every audit."""

    def enter(kind: Kind) -> Kind:
        if name in _REGISTRY:
            raise ValueError(f"name: must not be registered already; got {name!r}")
        kind.name = name
        _REGISTRY[name] = kind
        return kind

    return enter


def names() -> tuple[str, ...]:
    """Return the registered names in order of registration."""
    return tuple(_REGISTRY)


def policy(spec: str | Policy, **knobs: Any) -> Policy:
    """Return the policy named by ``spec``, such as ``policy("band", price=2.0)``.

    ``policy("band:price=2.0")`` means the same; see ``policies()`` for names and knobs.

    Raises
    ------
    ValueError
        Unknown name, unknown or missing knob, or a knob outside its range.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"policy: must be a spec string or a Policy; got {spec!r}")
    name, given = check.parse_spec(spec)
    check.one_of("policy", name, names())
    kind = _REGISTRY[name]
    twice = given.keys() & knobs.keys()
    if twice:
        raise ValueError(f"{min(twice)}: must be given once; got {spec!r} and {knobs!r}")
    values: dict[str, Any] = {**given, **knobs}
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for knob in values:
        if knob not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"policy: {name} takes the knobs {allowed}; got {knob!r}")
    for knob, field in known.items():
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed and knob not in values:
            raise ValueError(f"policy: {name} needs the knob {knob}; got {spec!r}")
    return kind(**values)


def policies() -> dict[str, dict[str, Any]]:
    """Return every rule's knobs (name to default, None if required), summary and declaration.

    The declaration is in words; ``policy(spec).declares`` has it with its numbers.
    """
    listing = {}
    for name, kind in _REGISTRY.items():
        knobs = {
            field.name: None if field.default is MISSING else field.default
            for field in fields(kind)  # type: ignore[arg-type]
        }
        listing[name] = {
            "knobs": knobs,
            "summary": (kind.__doc__ or "").strip().splitlines()[0],
            "declares": (kind.declares.__doc__ or "").strip().removeprefix("Return: "),
        }
    return listing
