"""The one list of divergences: name and knobs to divergence."""

import math
from dataclasses import fields
from typing import Any, TypeVar

import torch

from cactus_theory.base.specs import Registry, names_a_file, parse_spec, together
from cactus_theory.divergences._base import Divergence

Kind = TypeVar("Kind", bound=type[Divergence])
DIVERGENCES: Registry[type[Divergence]] = Registry(
    "divergence", Divergence, "a Divergence", "divergence"
)
ONCE = "divergence: a knob"
# f(1) = 0 and f′(1) are checked at registration up to this rounding
ROUNDING = 1e-9


def register_divergence(kind: Kind) -> Kind:
    """Make a divergence class available wherever a divergence is named.

    That is ``ct.divergence``, the optimum, the band, audits, the command line, and the solvers,
    which also need its form for cvxpy (``solvers/_perspective.py``). The class carries its name,
    its knobs as dataclass fields, an ``example`` of them if there are any, and its geometry (see
    :class:`Divergence`); what it declares of its generator at 1 is checked.

    Raises
    ------
    TypeError
        Not a Divergence class.
    ValueError
        A name of the base or one that is taken, an example without all knobs, f(1) ≠ 0, or
        f′(1) other than ``slope_at_one``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from cactus_theory.divergences import KL
    >>> @ct.register_divergence
    ... @dataclass(frozen=True)
    ... class Information(KL):
    ...     name = "information"
    >>> ct.divergence("information").value(torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]))
    tensor(0.2231, dtype=torch.float64)
    """
    if not (isinstance(kind, type) and issubclass(kind, Divergence)):
        raise TypeError(f"divergence: must be a Divergence class; got {kind!r}")
    if kind.name == Divergence.name or DIVERGENCES.taken(kind.name, kind):
        raise ValueError(f"name: must be set and not registered already; got {kind.name!r}")
    if set(kind.example) != set(knobs_of(kind)):
        raise ValueError(
            f"example: must name the knobs {', '.join(knobs_of(kind)) or 'none'} of {kind.name}; "
            f"got {kind.example!r}"
        )
    _check_generator(kind(**kind.example))
    DIVERGENCES.add(kind.name, kind)
    kind.registered_as = kind.name  # type: ignore[attr-defined]
    return kind


def _check_generator(example: Divergence) -> None:
    """Raise unless the generator is 0 at 1 with the slope that it declares there."""
    f, one = example.generator, torch.ones((), dtype=torch.float64)
    if f is None:
        return
    if not abs(float(f.f(one))) <= ROUNDING:
        raise ValueError(f"f: must be 0 at 1 ({example.spec}); got {float(f.f(one)):g}")
    slope = float(f.slope(one))
    if not math.isclose(slope, f.slope_at_one, rel_tol=ROUNDING, abs_tol=ROUNDING):
        raise ValueError(
            f"slope_at_one: must equal slope(1) ({example.spec}); "
            f"got {f.slope_at_one:g} and {slope:g}"
        )


def knobs_of(kind: type[Divergence]) -> tuple[str, ...]:
    """Return the names of a class's knobs."""
    return tuple(field.name for field in fields(kind))


def divergences() -> tuple[str, ...]:
    """Return the registered names in order of registration."""
    return DIVERGENCES.names()


def examples() -> tuple[str, ...]:
    """Return one spec of each family, for tables and audits."""
    return tuple(kind(**kind.example).spec for kind in DIVERGENCES.known.values())


def divergence(spec: str | Divergence, **knobs: Any) -> Divergence:
    """Return the divergence named by ``spec``, such as ``"kl"`` or ``"renyi:a=2"``.

    ``divergence("my_file.py:Mine")`` reads a divergence of your own from its file, and registers
    it under that name.

    Raises
    ------
    ValueError
        Unknown name or knob, a missing order, or an order outside its range.
    OSError, TypeError
        No such file; a file's name that is no divergence.

    Examples
    --------
    >>> kind = ct.divergence("renyi:a=2")
    >>> kind.spec
    'renyi:a=2'
    >>> kind.value(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.2877, dtype=torch.float64)
    """
    if not (isinstance(spec, str) and names_a_file(spec)):
        return registered_divergence(spec, **knobs)
    found, _ = DIVERGENCES.read(spec)
    kind = found if isinstance(found, type) else type(found)
    if DIVERGENCES.known.get(kind.name) is not kind:
        register_divergence(kind)
    values = together(spec, knobs, ONCE)
    return _built(kind, spec, values) if isinstance(found, type) or values else found


def registered_divergence(spec: str | Divergence, **knobs: Any) -> Divergence:
    """Return :func:`divergence`, but read no file: for what data and requests may name."""
    if isinstance(spec, Divergence):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"divergence: must be a spec string or a Divergence; got {spec!r}")
    kind = DIVERGENCES.find(parse_spec(spec)[0])
    return _built(kind, spec, together(spec, knobs, ONCE))


def _built(kind: type[Divergence], spec: str, values: dict[str, Any]) -> Divergence:
    wanted = knobs_of(kind)
    if set(values) != set(wanted):
        plural = "s" if len(wanted) > 1 else ""
        rule = f"needs exactly the knob{plural} {', '.join(wanted)}" if wanted else "takes no knobs"
        raise ValueError(f"divergence: {kind.name} {rule}; got {spec!r}")
    return kind(**values)
