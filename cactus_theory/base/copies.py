"""Give copies of rows to policies from outside the package, and check the rows they return."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import isfunction, signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

PACKAGE = __name__.partition(".")[0]
# words in errors of numpy and torch about a write into rows that are read-only or expanded
READ_ONLY = ("read-only", "WRITEABLE", "single memory location")
# words in errors of a rule that mixes numpy with torch
MIXED = ("Tensor", "torch.", "ndarray", "numpy.")
# methods of a policy that return laws up to a factor
LAWS = ("residual", "target", "emitted", "undrafted")


def is_own(kind: Any) -> bool:
    """Return whether a class or a function is defined in this package."""
    return kind.__module__.partition(".")[0] == PACKAGE


def copied(value: Any) -> Any:
    """Return a value with its tensors and arrays copied, also in lists, tuples and dataclasses.

    Copies of arrays are read-only.
    """
    if isinstance(value, Tensor):
        return _once(value).clone().expand(value.shape)
    if isinstance(value, np.ndarray):
        # an array over bytes cannot be made writable again; an array with its own memory can
        value = cast(np.ndarray, value)
        return np.frombuffer(value.tobytes(), value.dtype).reshape(value.shape)
    if isinstance(value, tuple | list):
        items: Any = cast(Any, value)
        kind, parts = items.__class__, map(copied, items)
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)  # named tuples take fields
    if is_dataclass(value) and not isinstance(value, type):
        entries = (entry.name for entry in fields(value) if entry.init)
        return replace(value, **{name: copied(getattr(value, name)) for name in entries})
    return value


def _once(rows: Tensor) -> Tensor:
    """Return a view in which expanded axes have length 1."""
    return rows[tuple(slice(0, 1) if step == 0 else slice(None) for step in rows.stride())]


def _changed(copy: Any, value: Any) -> bool:
    """Return whether a copy now differs from the value that it was made from."""
    if isinstance(copy, tuple | list):
        return any(map(_changed, cast(Any, copy), value))
    if isinstance(copy, np.ndarray):
        return copy.tobytes() != value.tobytes()
    if not isinstance(copy, Tensor) or copy.is_cuda:  # a comparison would wait for the GPU
        return False
    new, old = _once(copy), _once(value)
    # ``equal`` is false where both are NaN
    return not (torch.equal(new, old) or torch.allclose(new, old, rtol=0, atol=0, equal_nan=True))


@contextmanager
def lent(name: str, *values: Any) -> Generator[tuple[Any, ...]]:
    """Lend copies of rows to the rule called ``name``; ValueError if the rule writes into them."""
    copies, how = copied(values), "they were changed"
    try:
        yield copies
        if not _changed(copies, values):
            return
    except TypeError as error:
        if not any(text in str(error) for text in MIXED):
            raise
        raise TypeError(f"{name}: must not mix numpy with torch; got {error}") from error
    except (ValueError, RuntimeError) as error:
        if not any(text in str(error) for text in READ_ONLY):
            raise
        how = str(error)
    raise ValueError(
        f"{name}: must not write into its rows ({how}); change a copy, as of q = q.copy() "
        "in numpy or q = q.clone() in torch"
    )


def called(policy: Any) -> str:
    """Return the name of a policy, or of its class if the policy has no name."""
    return getattr(policy, "name", type(policy).__name__)


def lawful(name: str, rows: Any, judged: Callable[[], Any] = lambda: True) -> Tensor:
    """Check that ``rows``, which a rule returned, have positive and finite sums; return the rows.

    Raises ValueError, with the rule's ``name``, if a row for which ``judged()`` is true has another
    sum. Rows on CUDA are not checked.
    """
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name}: must return rows of probabilities; got {rows!r:.80}")
    total = rows.sum(-1)
    if rows.is_cuda or bool(((total > 0) & (total < torch.inf)).all()):  # NaN is not
        return rows
    wrong = ~((total > 0) & (total < torch.inf)) & judged()
    if bool(wrong.any()):
        row = cast(Any, rows[wrong][0]).tolist()
        raise ValueError(f"{name}: must return rows of positive, finite mass; got {row!r:.80}")
    return rows


def numbers(name: str, answer: Tensor, judged: Any) -> Tensor:
    """Return a rule's acceptance probabilities; ValueError for NaN where ``judged`` is true."""
    if not answer.is_cuda and bool((answer.isnan() & judged).any()):
        raise ValueError(f"{name}: must return numbers; got nan")
    return answer


def guard(kind: Any) -> None:
    """Wrap the methods of a policy class from outside the package, so that they get copies of rows.

    Only methods that a base class in the package has, too, are wrapped. TypeError if the method
    ``target`` lacks the parameter ``path``.
    """
    if is_own(kind):
        return
    if "path" not in (takes := signature(kind.target)).parameters:
        raise TypeError(
            f"{kind.__name__}.target: must be target(self, q, p, path=None); path is how a "
            f"verifier of blocks reached a row, got {takes}"
        )
    of_package = {name for base in kind.__mro__ if is_own(base) for name in base.__dict__}
    for name in of_package:
        owner = next(base for base in kind.__mro__ if name in base.__dict__)
        method = owner.__dict__[name]
        foreign = not is_own(owner) and not hasattr(method, "lends_copies")
        if isfunction(method) and not name.startswith("__") and foreign:
            setattr(kind, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a policy's method so that it gets copies of rows; invalid results raise ValueError."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        name = f"{called(self)}, {method.__name__}"
        with lent(name, arguments, tuple(options.values())) as (rows, named):
            answer = method(self, *rows, **dict(zip(options, named, strict=True)))
        if method.__name__ == "acceptance":  # the arguments are q, p and token ids
            return numbers(name, answer, arguments[1].gather(-1, arguments[2]) > 0)
        # ``target`` may return None, except in classes whose law is this row
        rowless = answer is None and not hasattr(self, "row_is_emitted")
        if method.__name__ not in LAWS or (method.__name__ == "target" and rowless):
            return answer

        def rejectable() -> Any:  # a residual matters only for tokens that can be rejected
            if method.__name__ != "residual":
                return True
            q, p, n = arguments
            drafted = p.gather(-1, n[..., None])[..., 0] > 0
            return drafted & ~(self.acceptance(q, p, n[..., None])[..., 0] >= 1)

        return lawful(name, answer, judged=rejectable)

    call.lends_copies = True  # type: ignore[attr-defined]
    return call
