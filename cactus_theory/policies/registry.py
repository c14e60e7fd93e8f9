"""Find policies by a spec, which is a registered name with knob values: ``band:price=2``."""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cactus_theory.base.copies import called
from cactus_theory.base.specs import Registry, merged_knobs, names_a_file, parse_spec
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import knob_values
from cactus_theory.policies.policy import Policy
from cactus_theory.policies.rule import DEFINED, FunctionPolicy

Kind = TypeVar("Kind", bound=type[Policy] | Policy)
POLICIES: Registry[Any] = Registry(
    "policy", Policy, "a Policy, for example a function under @ct.rule", "rule"
)


def register(name: str | Any) -> Callable[[Kind], Kind]:
    """Make a policy class, or a function under ``@ct.rule``, available by name.

    ``ct.policy``, the command line, every audit and every test then find the policy.

    Raises
    ------
    ValueError
        The name is taken (reading the same file again is allowed), or there is no name.
    TypeError
        The object is neither a policy class nor a function under ``@ct.rule``.

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

    def add(entry: Any) -> Any:
        kind: Any = type(entry) if isinstance(entry, FunctionPolicy) else entry
        if not isinstance(kind, type) or not issubclass(kind, Policy):
            raise TypeError(
                f"register: must be a Policy class or a function under @ct.rule; got {entry!r}"
            )
        POLICIES.add(name, kind)
        return entry

    return add


def read_policy(spec: str | Policy | type[Policy] | Any, **knobs: Any) -> Policy:
    """Return the policy named by ``spec``, such as ``policy("band", price=2.0)``.

    ``policy("band:price=2.0")`` means the same; see :func:`list_policies` for names and knobs.
    ``policy("my_file.py:my_rule:alpha=0.5")`` reads a policy of your own from its file. A function
    under ``@ct.rule`` that this process has defined is found by its name. ``spec`` may also be a
    policy or a policy class, which is returned with the given knobs. Knob values are converted to
    the knob's annotated type: ``"3"`` to an int, ``"true"`` to a bool, ``"none"`` to None.

    Raises
    ------
    ValueError
        Unknown name, unknown or missing knob, a knob outside its range, a file that cannot be
        read.
    TypeError
        Neither a name nor a policy; an object in a file that is no policy.
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
    if isinstance(spec, Policy) or (isinstance(spec, type) and issubclass(spec, Policy)):
        name = spec.__name__ if isinstance(spec, type) else called(spec)
        return _at_knobs(spec, name, name, knobs)
    if not isinstance(spec, str):
        raise TypeError(f"policy: must be a spec string or a Policy; got {spec!r}")
    if names_a_file(spec):
        return policy_in_file(spec, knobs)
    values = _with_divergence(merged_knobs(spec, knobs))
    name = parse_spec(spec)[0]
    return _at_knobs(_known(name), name, spec, values)


def class_of(spec: Any) -> type[Policy]:
    """Return the class of the policy that a spec names; raises as :func:`read_policy`."""
    if isinstance(spec, str):
        spec = POLICIES.read(spec)[0] if names_a_file(spec) else _known(parse_spec(spec)[0])
    elif not isinstance(spec, Policy | type):
        raise TypeError(f"policy: must be a spec string or a Policy; got {spec!r}")
    return spec if isinstance(spec, type) else type(spec)


def _known(name: str) -> Any:
    """Return the policy registered as ``name``, else the ``@ct.rule`` function of that name."""
    # a function that was imported twice has two places, of which the last counts
    by_function: dict[Any, tuple[str, str]] = {}
    for place, kind in DEFINED.items():
        if kind.name == name:
            by_function[_written(kind.source.function) or place] = place
    places = list(by_function.values())
    if name in POLICIES.known or not places:
        return POLICIES.find(name)
    if len(places) > 1:
        several = ", ".join(map(".".join, places))
        raise ValueError(f"policy: must name one function under @ct.rule; {name!r} names {several}")
    return DEFINED[places[0]]


def _written(function: Any) -> tuple[str, str] | None:
    """Return file and name of a function, so that two imports of one function count as one."""
    code = getattr(function, "__code__", None)
    if code is None or not Path(code.co_filename).is_file():
        return None
    return code.co_filename, code.co_qualname


def policy_in_file(spec: str, knobs: dict[str, Any], *others: type) -> Any:
    """Return the policy ``FILE.py:NAME`` at ``knobs``.

    NAME may also be one of the classes ``others``, a subclass of them, or an instance.
    """
    entry, source = POLICIES.read(spec, *others)
    values = _with_divergence(merged_knobs(spec, knobs))
    return _at_knobs(entry, Path(source).name, source, values)


def _with_divergence(values: dict[str, Any]) -> dict[str, Any]:
    """Return knobs; if ``divergence`` is ``FILE.py:NAME``, read the file and put the spec there."""
    if not names_a_file(str(values.get("divergence"))):
        return values
    return values | {"divergence": read_divergence(values["divergence"]).spec}


def policy_of_data(spec: Any, path: str | Path, *, trust_code: bool = False) -> Policy:
    """Return the policy of ``spec``, found in the data file ``path``; by default no code is run.

    The spec must name a registered policy. With ``trust_code`` the spec is read as by
    :func:`read_policy`. Raises ValueError for anything but a spec, for ``FILE.py:NAME``, and as
    :func:`read_policy`.
    """
    if trust_code:
        return read_policy(spec)
    if not isinstance(spec, str) or names_a_file(spec):
        raise ValueError(
            "policy: must be a registered name in a data file, which runs no code (--trust-code, "
            f"trust_code=True: it may); got {spec!r:.200} in {path}"
        )
    try:
        name, knobs = parse_spec(spec)
        if code := next(filter(names_a_file, knobs.values()), None):
            raise ValueError(f"policy: must name no code in a data file; got {code!r:.200}")
        return _at_knobs(POLICIES.find(name), name, spec, knobs)
    except ValueError as error:
        raise ValueError(f"{error}; in {path}") from None


def _at_knobs(entry: Any, name: str, spec: Any, values: dict[str, Any]) -> Any:
    """Return the policy ``entry``, a policy class or a policy, with the knob ``values``."""
    kind: Any = entry if isinstance(entry, type) else type(entry)
    # a policy object that is no dataclass cannot be copied at other knobs
    known = knob_values.of(kind) if entry is kind or is_dataclass(entry) else {}
    for knob in values:
        if knob not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"policy: {name} takes the knobs {allowed}; got {knob!r}")
    ready = knob_values.read(kind, values)
    if entry is not kind:
        return replace(entry, **ready) if ready else entry  # type: ignore[type-var]
    for knob, parameter in known.items():
        if parameter.default is knob_values.MISSING and knob not in ready:
            raise ValueError(f"policy: {name} needs the knob {knob}; got {spec!r}")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TypeError(f"policy: {name} is abstract; it lacks {', '.join(missing)}")
    return kind(**ready)


def list_policies() -> dict[str, dict[str, Any]]:
    """Return every policy's knobs (name to default, None if required), summary and declaration.

    The declaration is in words; ``policy(spec).declares`` has the numbers at given knobs.

    Examples
    --------
    >>> ct.list_policies()["mixture"]["knobs"]
    {'alpha': None, 'support': 'target', 'tilt': 0.0}
    >>> print(ct.list_policies()["speculative"]["declares"])
    lossless.
    """
    return {
        name: {
            "knobs": {
                knob: None if entry.default is knob_values.MISSING else entry.default
                for knob, entry in knob_values.of(kind).items()
            },
            "summary": (kind.__doc__ or kind.__name__).strip().splitlines()[0],
            "declares": _declared(kind),
        }
        for name, kind in POLICIES.known.items()
    }


def _declared(kind: Any) -> str:
    if issubclass(kind, FunctionPolicy):
        return str(kind().declares.budget or "no budget")
    return (kind.declares.__doc__ or "").strip().removeprefix("Return: ")
