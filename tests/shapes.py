"""Check the shapes written in annotations while tests run.

Only jaxtyping annotations are checked: plain ones (``delta: float``) are pyright's business,
and at run time bad values must reach the package's own errors.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def holds_a_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(holds_a_shape(part) for part in get_args(hint))


def shapes_only(function: Callable) -> Callable:
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if holds_a_shape(hint)}
    return beartype(function)
