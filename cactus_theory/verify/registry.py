"""Verifiers by name, for the command line, the decode loop and everything that takes one."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from cactus_theory.base.specs import Registry, names_a_file, parse_spec
from cactus_theory.verify.contract import Verifier

VERIFIERS: Registry[Verifier] = Registry("verifier", Verifier, "a Verifier", "verifier")
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
        VERIFIERS.add(name, kind())
        kind.name = kind.registered_as = name  # type: ignore[attr-defined]
        return kind

    return enter


def verifiers(metered: bool = False) -> tuple[str, ...]:
    """Return the names of the registered verifiers; only those that can be metered if asked.

    Examples
    --------
    >>> "fly" in verifiers(), "fly" in verifiers(metered=True)
    (True, False)
    """
    names = VERIFIERS.names()
    return tuple(own for own in names if not (metered and VERIFIERS.find(own).looks_ahead))


def find_verifier(verifier: str | Verifier) -> Verifier:
    """Return the verifier of that name, or the verifier itself.

    A name may be followed by options, as in ``block:bonus=policy``. ``my_file.py:Mine`` is read
    from its file.

    Raises
    ------
    ValueError
        A name that is not registered, an option that the verifier does not have or that is
        given twice.
    OSError, TypeError
        No such file; a file's name that is no verifier.

    Examples
    --------
    >>> find_verifier("block:bonus=policy").spec
    'block:bonus=policy'
    """
    if isinstance(verifier, Verifier):
        return verifier
    if not names_a_file(str(verifier)):
        return registered_verifier(verifier)
    found, _ = VERIFIERS.read(verifier)
    return _with_options(found() if isinstance(found, type) else found, verifier)


def registered_verifier(verifier: str) -> Verifier:
    """Return :func:`find_verifier`, but read no file: for what data may name."""
    name, _ = parse_spec(str(verifier))
    return _with_options(VERIFIERS.find(name), verifier)


def _with_options(found: Verifier, spec: str) -> Verifier:
    _, options = parse_spec(str(spec))
    known = [field.name for field in fields(found)] if is_dataclass(found) else []
    for option in options:
        if option not in known:
            has = f"the options {', '.join(known)}" if known else "no options"
            raise ValueError(f"verifier: {found.name} takes {has}; got {option!r}")
    return replace(found, **options) if options else found  # type: ignore[type-var]
