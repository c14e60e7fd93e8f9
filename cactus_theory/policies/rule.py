"""Turn a plain function into a policy, with the decorator :func:`rule`."""

import dataclasses
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.copies import lawful, lent, numbers
from cactus_theory.base.tensors import as_list, from_numpy, ungraphed
from cactus_theory.divergences import read_divergence
from cactus_theory.policies import knob_values
from cactus_theory.policies._base_classes import FixedTarget, SharedResidual
from cactus_theory.policies.claims import Budget, Declaration
from cactus_theory.policies.policy import ENTRIES, Id, Ids, PathState, Policy, Rows, normalised_or

Function = Callable[..., Any]

# the classes made from functions under ``@ct.rule`` in this process, by module and qualified name
DEFINED: dict[tuple[str, str], Any] = {}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# seconds of a scalar function's calls for one batch after which a warning names faster forms
SLOW_SECONDS = 5.0
FASTER = (
    "it is called for one row and one token at a time. Faster: f(q, p), which returns the row to "
    "emit, or @ct.rule(vectorised=True), see help(cactus_theory.rule)"
)


class FunctionPolicy(Policy):
    """A policy given by a plain function, whose knobs are the fields of the policy's class."""

    source: ClassVar[Any]  # what was given to ``rule``

    def __call__(self, *arguments: Any, **knobs: Any) -> Any:
        """Call the function with the policy's knob values, unless ``knobs`` gives other values."""
        return self.function(*arguments, **{**vars(self), **knobs})

    @property
    def function(self) -> Function:
        """Return the function that was given to ``rule``."""
        return self.source.function

    @property
    def spec(self) -> str:
        """Return the string that rebuilds this policy, with every knob."""
        knobs = ",".join(f"{knob}={value}" for knob, value in vars(self).items())
        return f"{self.name}:{knobs}" if knobs else self.name

    @property
    def declares(self) -> Declaration:
        """Return the decorator's declaration, with the budget at the current knob values."""
        text = self.source.budget
        budget = None if text is None else Budget.read(text, vars(self))
        return Declaration(budget=budget, **self.source.declared)

    def _answers(
        self, function: Function, q: Rows, p: Rows, row: Tensor, token: Tensor | None = None
    ) -> Tensor:
        """Call a function for the rows of q and p (R, V) with indices ``row`` (m,); return results.

        With ``token`` (m,) the function also gets a drafted token for each row. The results (m, …)
        are float64.
        """
        source, name = self.source, function.__name__
        name = name if function is source.function else f"{self.name}, {name}"
        # f(q, p, n) answers with φ, one number; f(q, p) and a residual with a row
        single = function is source.function and token is not None
        shape = torch.Size() if single else q.shape[-1:]
        if not len(row):
            return torch.zeros((0, *shape), dtype=torch.float64, device=q.device)
        answers = list[Tensor]()
        named = inspect.signature(function).parameters  # a residual need not name all knobs
        knobs = {knob: value for knob, value in vars(self).items() if knob in named}
        questions, start = (row,) if token is None else (row, token), time.monotonic()
        if source.vectorised:
            call = partial(function, **knobs)
            for answer, count in _in_batches(name, call, q, p, questions):
                answers.append(_answer(name, answer, (count, *shape)))
        else:
            with lent(name, *(part.detach().cpu().numpy() for part in (q, p))) as (q_rows, p_rows):
                for at, *n in zip(*map(as_list, questions), strict=True):
                    answer = function(q_rows[at], p_rows[at], *n, **knobs)
                    answers.append(_answer(name, answer, shape)[None])
            if (taken := time.monotonic() - start) > SLOW_SECONDS:
                told = f"{name}: took {taken:.0f} s for {len(row):,} questions; {FASTER}"
                warnings.warn(told, stacklevel=2)
        every_answer = torch.cat(answers).to(q.device)
        if single:
            return numbers(name, every_answer, True)
        return lawful(name, every_answer)


def _answer(name: str, answer: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a function's result as a new float64 tensor; ValueError unless it has ``shape``."""
    if isinstance(answer, Tensor):  # a copy, as the function may write into its tensor again
        converted = answer.detach().to(torch.float64, copy=True)
    else:
        converted = from_numpy(np.array(answer, dtype=np.float64))
    if converted.shape != shape:
        due = f"shape {tuple(shape)}" if shape else "one number"
        raise ValueError(f"{name}: must return {due}; got shape {tuple(converted.shape)}")
    return converted


def faster_form(policy: Any) -> str:
    """Return advice for a function that is called for one token at a time, else an empty text."""
    scalar = isinstance(policy, FunctionPolicy) and not policy.source.vectorised
    return FASTER if scalar and not isinstance(policy, FixedTarget) else ""


def _in_batches(
    name: str, call: Function, q: Rows, p: Rows, questions: Sequence[Tensor]
) -> Iterator[tuple[Any, int]]:
    """Call a vectorised function; yield its answers and the number of rows of each call.

    ``questions`` holds the index (m,) of each row and, for f(q, p, n), the token (m,). A call
    gets copies of at most ENTRIES entries. A row is copied once for all of its tokens, also if
    these need several calls: a copy for each call would take most of the time at a large
    vocabulary.
    """
    step = max(1, ENTRIES // q.shape[-1])
    runs = [len(list(same)) for _, same in groupby(as_list(questions[0]))]
    sizes = runs if max(runs) > step else step
    for at, *ids in zip(*(torch.split(part, sizes) for part in questions), strict=True):
        with lent(name, _picked(q, at), _picked(p, at), *ids) as copies:
            for part in zip(*(torch.split(copy, step) for copy in copies), strict=True):
                yield call(*part), len(part[0])


def _picked(rows: Tensor, row: Tensor) -> Tensor:
    """Return the rows at indices ``row`` (m,) of ``rows`` (R, V); a view if indices are equal."""
    return rows[row[0]].expand(len(row), -1) if bool((row == row[0]).all()) else rows[row]


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


class FunctionRule(FunctionPolicy):
    """A policy that accepts a drafted token with a probability given by a function of (q, p, n)."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ(n) from the function, which is not called for tokens with p_n = 0."""
        q, p = ungraphed(q), ungraphed(p).expand(q.shape)
        phi, drafted = (q.gather(-1, n) > 0).double(), p.gather(-1, n) > 0
        # ids (..., m) are m tokens of each row: the number of the row that each belongs to
        row = torch.arange(n.numel(), device=n.device).reshape(n.shape) // max(1, n.shape[-1])
        phi[drafted] = self._answers(self.function, _flat(q), _flat(p), row[drafted], n[drafted])
        return phi

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return (q − p)₊ normalised, or the rows of the residual function that ``rule`` was given.

        The residual function is called only where n can be rejected; elsewhere the row is q.
        """
        q, drafts = ungraphed(q), ungraphed(p).to(q.dtype)
        if self.source.residual is None:
            rows = q.double()
            return normalised_or((rows - drafts.double()).clamp(min=0.0), rows)
        phi = self.acceptance(q, drafts, n[..., None]).reshape(-1)
        out = _flat(q).double().clone()
        refused = (~(phi >= 1)).nonzero()[:, 0]  # a φ of NaN, too
        token = None if isinstance(self, SharedResidual) else n.reshape(-1)[refused]
        out[refused] = self._answers(self.source.residual, _flat(q), _flat(drafts), refused, token)
        return out.reshape(q.shape)

    def _recovered(
        self, q: Float[Tensor, "vocab"], p: Float[Tensor, "vocab"], n: Int[Tensor, "m"]
    ) -> Float[Tensor, "m vocab"]:
        """Return the residual function's rows (m, V) after each of the tokens ``n`` is rejected."""
        return self._answers(self.source.residual, q[None], p[None], torch.zeros_like(n), n)


class FunctionTarget(FunctionPolicy, FixedTarget):
    """A policy that emits a row given by a plain function of (q, p)."""

    def target(self, q: Rows, p: Rows, path: PathState | None = None) -> Rows:
        """Return the rows h (..., V) that the function gives."""
        q, p = (rows.expand(np.broadcast_shapes(q.shape, p.shape)) for rows in (q, p))
        every = torch.arange(q.shape[:-1].numel(), device=q.device)
        return self._answers(self.function, _flat(q), _flat(p), every).reshape(q.shape)


def rule(
    function: Function | None = None,
    *,
    residual: Function | None = None,
    vectorised: bool = False,
    knob_range: tuple[float, float] | None = None,
    budget: str | None = None,
    **declared: Any,
) -> Any:
    """Make a policy of a function of three arguments (q, p, n), or of two (q, p).

    * ``f(q, p, n)`` returns the probability of keeping the drafted token n. A rejected token is
      replaced by a draw from ``residual(q, p, n)``, or from ``residual(q, p)`` if n does not
      matter (much faster at a large vocabulary); by default from (q − p)₊ normalised.
    * ``f(q, p)`` returns the row h to emit instead of q. The drafted token is then kept with
      min(1, h_n/p_n), and a rejected token is replaced by a draw from (h − p)₊ normalised.

    q and p are numpy rows of V probabilities, n an integer. Keyword-only parameters with defaults
    are knobs; ``residual`` gets the knobs that it names. ``direction``, ``strict`` and
    ``knob_range`` refer to the first knob. The function is called once per row and token: fine for
    checking an idea, slow in a decode loop. In the process that defines a function, the
    function's name can be used in specs: ``ct.generate(policy="louder:delta=0.2")``.

    Under ``@ct.rule(vectorised=True)`` the function is called for many rows at once: q and p are
    torch tensors (..., V) and n is (...,). The function returns φ (...,), or h (..., V) from
    (q, p); ``residual`` returns (..., V). Either way f(q, p, n) is not called for tokens with
    p_n = 0. The result for a row must depend on this row only (this is tested)::

        @ct.rule(vectorised=True)
        def lossless(q, p, n):
            q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
            return (q_n / p_n).clamp(max=1)

    Parameters
    ----------
    function : f(q, p, n) or f(q, p); None when the decorator is given options.
    residual : the function that returns the row to draw from after a rejection, for f(q, p, n).
    vectorised : whether ``function`` and ``residual`` are called for many rows at once.
    knob_range : the least and the largest legal value of the first knob.
    budget : such as ``"kl <= delta emitted"`` or ``"kl <= 0.1 per proposal"``; the amount is a
        number or a knob.
    **declared : the other fields of :class:`Declaration`: ``direction``, ``strict`` (the value
        at which the policy is lossless), ``between``, ``at_least_speculative``, ``continuous``,
        ``support``, ``optimal``.

    Raises
    ------
    TypeError
        A function with neither two nor three arguments, a ``residual`` for f(q, p), or a
        declaration that does not exist.
    ValueError
        A knob, a budget or a declared value that cannot be read.

    Examples
    --------
    >>> @ct.rule(budget="kl <= delta emitted")
    ... def louder(q, p, n, *, delta=0.1):
    ...     return min(1, (1 + delta) * q[n] / p[n])
    >>> seen = ct.audit(louder, np.array([0.2, 0.8]), np.array([0.9, 0.1]))
    >>> print(f"{seen.acceptance:.2f}, within its budget: {seen.within}")
    0.32, within its budget: True
    """
    written: dict[str, Any] = {"residual": residual, "vectorised": vectorised}
    written |= {"knob_range": knob_range, "budget": budget}
    if function is None:
        return partial(rule, **written, **declared)
    if type(vectorised) is not bool:
        raise ValueError(f"vectorised: must be True or False; got {vectorised!r}")
    count, knobs = _read(function)
    if knob_range is not None and not _rises(knob_range):
        raise ValueError(f"knob_range: must be two numbers, rising; got {knob_range!r}")
    declared = _read_declared(declared, bool(knobs))
    if count == 2 and residual is not None:
        raise TypeError("residual: follows from the target row of f(q, p); got one of its own")
    fields = [(name, knob.annotation, knob.default) for name, knob in knobs.items()]
    kind: Any = dataclasses.make_dataclass(
        function.__name__, fields, bases=_bases(count, residual), frozen=True
    )
    kind.__module__, kind.__qualname__ = function.__module__, function.__qualname__
    kind.__doc__, kind.name = function.__doc__, function.__name__
    kind.source = SimpleNamespace(function=function, **written, declared=declared)
    kind.knob = next(iter(knobs), None)
    policy = kind()
    if policy.declares.budget is not None:
        read_divergence(policy.declares.budget.divergence)
    DEFINED[kind.__module__, kind.__qualname__] = kind
    return policy


def _read(function: Function) -> tuple[int, dict[str, inspect.Parameter]]:
    """Return the number of positional arguments of a function, and its knobs."""
    parameters = inspect.signature(function).parameters
    count = sum(entry.kind in POSITIONAL for entry in parameters.values())
    if count not in (2, 3):
        raise TypeError(
            "function: must take (q, p, n) or (q, p), and knobs after a *; "
            f"got {function.__name__}{inspect.signature(function)}"
        )
    every = knob_values.of(function).items()
    knobs = {name: knob for name, knob in every if knob.kind is knob.KEYWORD_ONLY}
    for name, knob in knobs.items():
        if knob.default is knob_values.MISSING:
            raise ValueError(f"function: the knob {name} needs a default value; got none")
        if hasattr(FunctionPolicy, name) or name in ("name", "source"):
            raise ValueError(f"function: a knob must not be named as a policy's own; got {name!r}")
    return count, knobs


def _rises(ends: Any) -> bool:
    try:
        low, high = map(float, ends)
    except (TypeError, ValueError):
        return False
    return low <= high


def _bases(count: int, residual: Function | None) -> tuple[type[Policy], ...]:
    """Return the base classes of the policy that :func:`rule` makes of a function.

    ``count`` is the number of the function's arguments q, p and n. A policy of f(q, p, n) is a
    ``SharedResidual`` unless ``residual`` takes the rejected token, too.
    """
    if count == 2:
        return (FunctionTarget,)
    if residual is not None:
        kinds = [entry.kind for entry in inspect.signature(residual).parameters.values()]
        positional = [kind for kind in kinds if kind in POSITIONAL]
        if len(positional) != 2 or inspect.Parameter.VAR_POSITIONAL in kinds:
            return (FunctionRule,)
    return SharedResidual, FunctionRule


def _read_declared(declared: dict[str, Any], has_knob: bool) -> dict[str, Any]:
    """Return the values declared to :func:`rule`, converted; raise for an invalid declaration."""
    known = {name: entry for name, entry in knob_values.of(Declaration).items() if name != "budget"}
    if unknown := min(declared.keys() - known, default=None):
        raise TypeError(f"rule: declares one of {', '.join(sorted(known))}; got {unknown!r}")
    for name, default in (("direction", 0), ("strict", None)):
        if not has_knob and declared.get(name, default) != default:
            raise ValueError(f"{name}: speaks of a knob, and the function has none after a *")
    if declared.get("strict") is not None:
        check.number("strict", declared["strict"], -math.inf)
    for name in declared:
        if isinstance(getattr(Declaration, name), bool) and not isinstance(declared[name], bool):
            raise ValueError(f"{name}: must be True or False; got {declared[name]!r}")
    return knob_values.read(Declaration, declared)
