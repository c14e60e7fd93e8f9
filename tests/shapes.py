"""Check the shapes written in annotations while tests run.

Only jaxtyping annotations are checked: plain ones (``delta: float``) are pyright's business,
and at run time bad values must reach the package's own errors. A checked call costs a tenth of
a millisecond, more than most of the functions do, so one call of each function in 32 is checked, in
the thorough suite one in 4.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache, wraps
from itertools import count
from typing import Any, get_args

import jaxtyping
from jaxtyping import AbstractArray, install_import_hook

ONE_IN = 32
# what the import hook puts on every function is replaced while the package is imported
_checked = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check shapes in a package that is not imported yet."""
    jaxtyping.jaxtyped = sampled  # type: ignore[assignment]
    install_import_hook(package, "tests.shapes.shapes_only")


def holds_a_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(holds_a_shape(part) for part in get_args(hint))


def shapes_only(function: Callable) -> Callable:
    from beartype import beartype

    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if holds_a_shape(hint)}
    return beartype(function)


def sampled(target: Any = None, *, typechecker: Any) -> Any:
    """Do what ``jaxtyping.jaxtyped`` does, on the calls that are checked."""
    if target is None:
        return lambda given: sampled(given, typechecker=typechecker)
    if isinstance(target, classmethod | staticmethod):
        return type(target)(sampled(target.__func__, typechecker=typechecker))
    if isinstance(target, property):
        return target.getter(sampled(target.fget, typechecker=typechecker))
    if inspect.isclass(target):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = sampled(target.__init__, typechecker=typechecker)
        return target
    if not any(map(holds_a_shape, getattr(target, "__annotations__", {}).values())):
        return target
    return _sampled_function(target, typechecker)


def _sampled_function(function: Callable, typechecker: Any) -> Callable:
    checked = cache(lambda: _checked(function, typechecker=typechecker))  # when it is first called
    calls = count()

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return (function if next(calls) % ONE_IN else checked())(*args, **kwargs)

    return wrapped
