"""The one list of policies: name and knobs to policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cactus_theory.base.specs import Registry, merged_knobs, names_a_file, parse_spec
from cactus_theory.divergences import divergence as read_divergence
from cactus_theory.policies import _knobs
from cactus_theory.policies._policy import Policy

Kind = TypeVar("Kind", bound=type[Policy] | Policy)
POLICIES: Registry[Any] = Registry(
    "policy", Policy, "a Policy, for example a function under @ct.rule", "rule"
)


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

    def enter(entry: Any) -> Any:
        if isinstance(entry, type) and issubclass(entry, Policy):
            POLICIES.add(name, entry)
            entry.name = entry.registered_as = name  # type: ignore[attr-defined]
            return entry
        if not hasattr(entry, "registered_under"):
            raise TypeError(
                f"register: must be a Policy class or a function under @ct.rule; got {entry!r}"
            )
        POLICIES.add(name, entry.registered_under(name))
        return POLICIES.find(name)

    return enter


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
    if names_a_file(spec):
        return policy_in_file(spec, knobs)
    values = _with_divergence(merged_knobs(spec, knobs))
    name = parse_spec(spec)[0]
    return _at_knobs(POLICIES.find(name), name, spec, values)


def policy_in_file(spec: str, knobs: dict[str, Any], *others: type) -> Any:
    """Return the policy of ``FILE.py:NAME``, or an object of ``others``, at the knobs given."""
    entry, source = POLICIES.read(spec, *others)
    values = _with_divergence(merged_knobs(spec, knobs))
    return _at_knobs(entry, Path(source).name, source, values)


def _with_divergence(values: dict[str, Any]) -> dict[str, Any]:
    """Return knobs with a divergence of ``FILE.py:NAME`` read and named by its own spec."""
    if not names_a_file(str(values.get("divergence"))):
        return values
    return values | {"divergence": read_divergence(values["divergence"]).spec}


def policy_of_data(
    spec: Any, path: str | Path, *, trust_code: bool = False, **knobs: Any
) -> Policy:
    """Return the policy that the data file ``path`` names, without running or reading more.

    It is a registered one. ``trust_code`` reads the spec as :func:`policy` does. Raises ValueError
    for what is no spec, ``FILE.py:NAME``, and as :func:`policy`.
    """
    if trust_code:
        return policy(spec, **knobs)
    if not isinstance(spec, str) or names_a_file(spec):
        raise ValueError(
            "policy: must be a registered name in a data file, which runs no code (--trust-code, "
            f"trust_code=True: it may); got {spec!r:.200} in {path}"
        )
    try:
        name, written = parse_spec(spec)
        values = merged_knobs(spec, knobs)
        if code := next(filter(names_a_file, written.values()), None):
            raise ValueError(f"policy: must name no code in a data file; got {code!r:.200}")
        return _at_knobs(POLICIES.find(name), name, spec, values)
    except ValueError as error:
        raise ValueError(f"{error}; in {path}") from None


def _at_knobs(entry: Any, name: str, spec: str, values: dict[str, Any]) -> Any:
    if isinstance(entry, type):
        return _knobs.built(entry, name, spec, values)
    return _knobs.with_knobs(entry, name, values)


def list_policies() -> dict[str, dict[str, Any]]:
    """Return every policy's knobs (name to default, None if required), summary and declaration.

    The declaration is in words; ``policy(spec).declares`` has it with its numbers.

    Examples
    --------
    >>> ct.list_policies()["mixture"]["knobs"]
    {'alpha': None, 'support': 'target'}
    >>> print(ct.list_policies()["speculative"]["declares"])
    lossless.
    """
    return {
        name: {
            "knobs": {
                knob: None if known.default is _knobs.MISSING else known.default
                for knob, known in _knobs.of(entry).items()
            },
            **_words(entry),
        }
        for name, entry in POLICIES.known.items()
    }


def _words(entry: Any) -> dict[str, str]:
    if not isinstance(entry, type):
        return {"summary": entry.summary, "declares": str(entry.declares.budget or "no budget")}
    summary = (entry.__doc__ or entry.__name__).strip().splitlines()[0]
    declares = (entry.declares.__doc__ or "").strip().removeprefix("Return: ")  # type: ignore[attr-defined]
    return {"summary": summary, "declares": declares}
