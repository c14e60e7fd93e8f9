"""Copies of the rows that foreign code gets, and a forecast of how long it will take."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import isfunction, signature
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.base.terminal import Progress

PACKAGE = __name__.partition(".")[0]
# words of the errors of numpy and torch for a write into rows that are read-only or expanded
READ_ONLY = ("read-only", "WRITEABLE", "single memory location")
# words of the errors of a rule that mixes numpy with torch
MIXED = ("Tensor", "torch.", "ndarray", "numpy.")
# methods of a policy that answer laws up to a factor
LAWS = ("residual", "target", "emitted")


def is_own(kind: Any) -> bool:
    """Return whether a class or a function is the package's own."""
    return kind.__module__.partition(".")[0] == PACKAGE


def copied(value: Any) -> Any:
    """Return tensors and arrays (in lists, tuples and dataclasses, too) as copies, else the value.

    Copies of arrays are read-only. Tensors count their changes even in inference mode.
    """
    if isinstance(value, Tensor):
        inferring = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inferring else nullcontext():
            copy = _once(value, value.stride()).clone()
            # the copy of an inference tensor has already counted one change
            return (copy.data if value.is_inference() else copy).expand(value.shape)
    if isinstance(value, np.ndarray):
        once = _once(value, value.strides)
        # an array over bytes cannot be made writable again; one over its own memory can
        frozen = np.frombuffer(once.tobytes(), once.dtype).reshape(once.shape)
        return np.broadcast_to(frozen, value.shape)
    if isinstance(value, tuple | list):
        parts = list(map(copied, value))
        if isinstance(value, tuple) and all(map(is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        parts = {name: copied(entry) for name, entry in entries.items()}
        same = all(parts[name] is entry for name, entry in entries.items())
        return value if same else replace(value, **parts)
    return value


@contextmanager
def lent(name: str, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Lend copies of rows to the rule called ``name``; ValueError if it writes into one."""
    copies = tuple(map(copied, values))
    try:
        yield copies
    except TypeError as error:
        if any(text in str(error) for text in MIXED):
            raise TypeError(
                f"{name}: must not mix numpy with torch (its rows and ids are of one kind, "
                f"arrays= of ct.rule); got {error}"
            ) from error
        raise
    except (ValueError, RuntimeError) as error:
        if any(text in str(error) for text in READ_ONLY):
            raise _written(name, str(error)) from error
        raise
    if any(map(_changed, copies, values)):
        raise _written(name, "they were changed")


def called(policy: Any) -> str:
    """Return the name of a policy, of its class where it has none."""
    return getattr(policy, "name", type(policy).__name__)


def lawful(name: str, rows: Any, judged: Callable[[], Any] = lambda: True) -> Tensor:
    """Return rows of a rule if they have finite mass where ``judged``; ValueError by its name."""
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name}: must return rows of probabilities; got {rows!r:.80}")
    total = rows.sum(-1)
    if rows.is_cuda or bool(((total > 0) & (total < torch.inf)).all()):  # NaN is not
        return rows
    wrong = ~((total > 0) & (total < torch.inf)) & judged()
    if bool(wrong.any()):
        row = rows[wrong][0].tolist()
        raise ValueError(f"{name}: must return rows of positive, finite mass; got {row!r:.80}")
    return rows


def numbers(name: str, answer: Tensor, judged: Any) -> Tensor:
    """Return a rule's acceptance; ValueError by its name for NaN where ``judged``."""
    if not answer.is_cuda and bool((answer.isnan() & judged).any()):
        raise ValueError(f"{name}: must return numbers; got nan")
    return answer


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a policy's method so that it gets read-only copies of rows."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        name = f"{called(self)}, {method.__name__}"
        with lent(name, arguments, tuple(options.values())) as (rows, named):
            answer = method(self, *rows, **dict(zip(options, named, strict=True)))
        if method.__name__ == "acceptance":
            return numbers(name, answer, arguments[1].gather(-1, arguments[2]) > 0)
        rowless = answer is None and not hasattr(self, "row_is_emitted")
        if method.__name__ not in LAWS or (method.__name__ == "target" and rowless):
            return answer

        def refusable() -> Any:  # a residual is read of tokens that can be refused
            if method.__name__ != "residual":
                return True
            q, p, n = arguments
            drafted = p.gather(-1, n[..., None])[..., 0] > 0
            return drafted & ~(self.acceptance(q, p, n[..., None])[..., 0] >= 1)

        return lawful(name, answer, refusable)

    call.lends_copies = True  # type: ignore[attr-defined]
    return call


def enter(policy: Any) -> None:
    """Give methods of foreign classes copies of rows, those of a policy.

    Where a policy enters: a door that is passed again changes nothing. TypeError for a target that
    takes no path.
    """
    kind = type(policy)
    if is_own(kind) or "_has_entered" in vars(kind):
        return
    if "path" not in (takes := signature(policy.target)).parameters:
        raise TypeError(
            f"{kind.__name__}.target: must be target(self, q, p, path=None); path is how a "
            f"verifier of blocks reached a row, got {takes}"
        )
    _guard(kind)


def _guard(kind: Any) -> None:
    """Guard the package's methods that a foreign class defines or inherits from a foreign class."""
    kind._has_entered = True
    hooks = {name for base in kind.__mro__ if is_own(base) for name in vars(base)}
    for name in hooks:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        method = vars(owner)[name]
        foreign = not is_own(owner) and not hasattr(method, "lends_copies")
        if isfunction(method) and not name.startswith("__") and foreign:
            setattr(kind, name, guarded(method))


def _once(value: Any, strides: tuple[int, ...]) -> Any:
    """Return a view of a tensor or an array in which expanded axes have length 1."""
    return value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]


def _changed(copy: Any, value: Any) -> bool:
    if isinstance(copy, Tensor):
        if copy._version or copy.is_cuda:  # a comparison would wait for the GPU
            return copy._version > 0
        new, old = (_once(part, part.stride()) for part in (copy, value))
        return not (
            torch.equal(new, old) or bool(((new == old) | (new != new) & (old != old)).all())
        )
    if isinstance(copy, np.ndarray):
        new, old = (_once(part, part.strides) for part in (copy, value))
        return new.tobytes() != old.tobytes()
    if isinstance(copy, tuple | list):
        return any(map(_changed, copy, value))
    return False


def _written(name: str, how: str) -> ValueError:
    return ValueError(
        f"{name}: must not write into its rows ({how}); change a copy, as of q = q.copy() "
        "in numpy or q = q.clone() in torch"
    )


# seconds of an enumeration until its total time is estimated, and the least estimate for which it
# warns and shows its progress
FIRST_SECONDS, SLOW_SECONDS = 1.0, 5.0
FASTER = (
    "where it does not depend on the refused token, residual=f(q, p) of ct.rule, or "
    "the base class SharedResidual, is asked once a row; meter=False (--meter off) decodes without"
)


class Forecast(Progress):
    """Follow an enumeration of ``refused`` tokens of rows of ``vocab``; warn if it is slow."""

    def __init__(self, spec: str, refused: int, vocab: int, rows: int) -> None:
        super().__init__("residual", refused)
        self.spec, self.vocab, self.rows, self.start = spec, vocab, rows, time.monotonic()
        self.slow: bool | None = None  # None until FIRST_SECONDS have passed

    def add(self, tokens: int) -> None:
        """Count tokens as enumerated, and warn once if the rest will be slow."""
        self.done += tokens
        taken = time.monotonic() - self.start
        ahead = taken * self.total / max(1, self.done)
        if self.slow is None and taken >= FIRST_SECONDS:
            self.slow = ahead > SLOW_SECONDS
            if self.slow:
                warnings.warn(
                    f"{self.spec}: the residual is asked for each of {self.total:,} tokens that "
                    f"may be refused (V = {self.vocab:,}), about {_time(ahead / self.rows)} for "
                    f"each of {self.rows} rows; {FASTER}",
                    stacklevel=4,
                )
        if self.slow:
            self.update(self.done, f"{_time(ahead - taken)} left")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
