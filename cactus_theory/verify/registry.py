"""Verifiers by name, for the command line, the decode loop and everything that takes one."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from cactus_theory import _arguments as check
from cactus_theory.verify.contract import Verifier

_VERIFIERS: dict[str, Verifier] = {}
Kind = TypeVar("Kind", bound=Verifier)


def register_verifier(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Make a verifier available by name wherever one is chosen.

    Raises
    ------
    ValueError
        A name that is taken.

    Examples
    --------
    >>> @register_verifier("mine")
    ... class Mine(Chain):
    ...     pass
    >>> find_verifier("mine").spec
    'mine'
    """

    def enter(kind: type[Kind]) -> type[Kind]:
        if name in _VERIFIERS:
            raise ValueError(f"name: must not be registered already; got {name!r}")
        kind.name = name
        _VERIFIERS[name] = kind()
        return kind

    return enter


def verifiers() -> tuple[str, ...]:
    """Return the names of the registered verifiers.

    Examples
    --------
    >>> "chain" in verifiers(), "block" in verifiers()
    (True, True)
    """
    return tuple(_VERIFIERS)


def find_verifier(verifier: str | Verifier) -> Verifier:
    """Return the verifier of that name, or the verifier itself.

    A name may be followed by options, as in ``block:bonus=policy``.

    Raises
    ------
    ValueError
        A name that is not registered, an option that the verifier does not have or that is
        given twice.

    Examples
    --------
    >>> find_verifier("block:bonus=policy").spec
    'block:bonus=policy'
    """
    if isinstance(verifier, Verifier):
        return verifier
    name, options = check.parse_spec(str(verifier))
    found = _VERIFIERS[check.one_of("verifier", name, verifiers())]
    known = [field.name for field in fields(found)] if is_dataclass(found) else []
    for option in options:
        if option not in known:
            has = f"the options {', '.join(known)}" if known else "no options"
            raise ValueError(f"verifier: {found.name} takes {has}; got {option!r}")
    return replace(found, **options) if options else found  # type: ignore[type-var]
