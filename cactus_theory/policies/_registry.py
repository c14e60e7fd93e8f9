"""The one list of policies: name and knobs to policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cactus_theory import _arguments as check
from cactus_theory._files import beside
from cactus_theory.policies import _file, _knobs
from cactus_theory.policies._base import Policy

Kind = TypeVar("Kind", bound=type[Policy] | Policy)
_REGISTRY: dict[str, type[Policy] | Policy] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a policy class, or a function under ``@ct.rule``, available by name.

    ``ct.policy``, the command line, every audit and every test find it then.

    Raises
    ------
    ValueError
        A name that is taken (reading the same file again is allowed), or no name.
    TypeError
        Neither a policy class nor a function under ``@ct.rule``.

    Examples
    --------
    >>> @ct.register("cautious")
    ... @ct.rule
    ... def cautious(q, p, n, *, share=0.5):
    ...     return share * min(1, q[n] / p[n])
    >>> ct.policy("cautious:share=0.25").spec
    'cautious:share=0.25'
    """
    if not isinstance(name, str) or not name or set(name) & set(":,= "):
        raise ValueError(f"name: must be a word without ':', ',' or '='; got {name!r}")

    def enter(kind: Kind) -> Kind:
        if name in _REGISTRY and _origin(_REGISTRY[name]) != _origin(kind):
            raise ValueError(f"name: must not be registered already; got {name!r}")
        if isinstance(kind, type) and issubclass(kind, Policy):
            kind.name = name
            kind.registered_as = name  # type: ignore[attr-defined]
            _REGISTRY[name] = kind
            return kind
        if not hasattr(kind, "registered_under"):
            raise TypeError(
                f"register: must be a Policy class or a function under @ct.rule; got {kind!r}"
            )
        made = kind.registered_under(name)  # type: ignore[union-attr]
        _REGISTRY[name] = made
        return made

    return enter


def _origin(kind: Any) -> tuple[str, str]:
    """Return where a class or a function was written."""
    written = kind if isinstance(kind, type) else getattr(kind, "function", kind)
    return (
        getattr(written, "__module__", ""),
        getattr(written, "__qualname__", repr(written)),
    )


def names() -> tuple[str, ...]:
    """Return the registered names in order of registration."""
    return tuple(_REGISTRY)


def registered(name: str) -> type[Policy] | Policy:
    """Return what is registered under a name; ValueError for another name."""
    return _REGISTRY[check.one_of("policy", name, names())]


def policy(spec: str | Policy | type[Policy], **knobs: Any) -> Policy:
    """Return the policy named by ``spec``, such as ``policy("band", price=2.0)``.

    ``policy("band:price=2.0")`` means the same; see :func:`list_policies` for names and knobs.
    ``policy("my_file.py:my_rule:alpha=0.5")`` reads a policy of your own from its file. A
    policy or a policy class instead of a name is returned at the given knobs. Values become
    what the knob is annotated with: ``"3"`` an int, ``"true"`` a bool, ``"none"`` None.

    Raises
    ------
    ValueError
        Unknown name, unknown or missing knob, a knob outside its range, a file that cannot be
        read.
    TypeError
        Neither a name nor a policy; a file's name that is no policy.
    OSError
        No such file.

    Examples
    --------
    >>> ct.policy("band", price=2.0) == ct.policy("band:price=2")
    True
    >>> ct.policy("band:price=2").spec
    'band:price=2.0'
    >>> ct.policy("band:delta=-1")
    Traceback (most recent call last):
        ...
    ValueError: delta: must lie in [0, inf]; got -1.0
    """
    if isinstance(spec, Policy):
        return _knobs.with_knobs(spec, getattr(spec, "name", type(spec).__name__), knobs)
    if isinstance(spec, type) and issubclass(spec, Policy):
        return _knobs.built(spec, spec.__name__, spec.__name__, knobs)
    if not isinstance(spec, str):
        raise TypeError(f"policy: must be a spec string or a Policy; got {spec!r}")
    if _file.names_a_file(spec):
        path, name, rest = _file.split(spec)
        return _file.policy_from(f"{path}:{name}", _together(spec, f"{name}:{rest}", knobs))
    return _registered(spec, check.parse_spec(spec)[0], _together(spec, spec, knobs))


def policy_of_data(
    spec: Any, path: str | Path, *, trust_code: bool = False, **knobs: Any
) -> Policy:
    """Return the policy that the data file ``path`` names, without running or reading more.

    It is a registered one, and its knobs name files of the data file's own folder only.
    ``trust_code`` reads the spec as :func:`policy` does.

    Raises
    ------
    ValueError
        No spec, ``FILE.py:NAME``, a file in another folder, and as :func:`policy`.
    """
    if trust_code:
        return policy(spec, **knobs)
    if not isinstance(spec, str) or _file.names_a_file(spec):
        raise ValueError(
            "policy: must be a registered name in a data file, which runs no code (--trust-code, "
            f"trust_code=True: it may); got {spec!r:.200} in {path}"
        )
    try:
        name, written = check.parse_spec(spec)
        values = _together(spec, spec, knobs)
        for knob in written.keys() & set(registered(name).file_knobs):
            values[knob] = str(beside(path, written[knob]))
        return _registered(spec, name, values)
    except ValueError as error:
        raise ValueError(f"{error}; in {path}") from None


def _registered(spec: str, name: str, values: dict[str, Any]) -> Policy:
    found = registered(name)
    if isinstance(found, type):
        return _knobs.built(found, name, spec, values)
    return _knobs.with_knobs(found, name, values)


def _together(spec: str, written: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs written in a spec together with those given as keywords."""
    _, given = check.parse_spec(written)
    twice = given.keys() & knobs.keys()
    if twice:
        raise ValueError(f"{min(twice)}: must be given once; got {spec!r} and {knobs!r}")
    return {**given, **knobs}


def list_policies() -> dict[str, dict[str, Any]]:
    """Return every policy's knobs (name to default, None if required), summary and declaration.

    The declaration is in words; ``policy(spec).declares`` has it with its numbers.

    Examples
    --------
    >>> ct.list_policies()["band"]["knobs"]
    {'delta': None, 'price': None, 'divergence': 'kl'}
    >>> print(ct.list_policies()["speculative"]["declares"])
    lossless.
    """
    return {
        name: {
            "knobs": {
                knob: None if entry.default is _knobs.MISSING else entry.default
                for knob, entry in _knobs.of(found).items()
            },
            "summary": _summary(found),
            "declares": _declares(found),
        }
        for name, found in _REGISTRY.items()
    }


def _summary(found: type[Policy] | Policy) -> str:
    if isinstance(found, type):
        return (found.__doc__ or found.__name__).strip().splitlines()[0]
    return found.summary  # type: ignore[attr-defined]


def _declares(found: type[Policy] | Policy) -> str:
    if isinstance(found, type):
        return (found.declares.__doc__ or "").strip().removeprefix("Return: ")
    return str(found.declares.budget or "no budget")
