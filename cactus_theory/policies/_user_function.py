"""Policies that call plain functions, as made by :func:`cactus_theory.rule`."""

import dataclasses
import inspect
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.policies import _knobs
from cactus_theory.policies._base_classes import FixedTarget, SharedResidual
from cactus_theory.policies._copies import lawful, lent, numbers
from cactus_theory.policies._decisions import Budget, Declaration, Path
from cactus_theory.policies._policy import Id, Ids, Policy, Rows, normalised_or

Function = Callable[..., Any]
Shape = tuple[int, ...]

# most entries of the rows in one call of a vectorised function: 2^22 float64 are 32 MiB
ENTRIES = 2**22
# seconds of a scalar function's calls for one batch after which a warning names ``vectorised``
SLOW_SECONDS = 5.0
VECTORISE = (
    "it is called for one row and one token at a time; under @ct.rule(vectorised=True) it is "
    "called for many at once, see help(cactus_theory.rule)"
)


@dataclasses.dataclass(frozen=True)
class Source:
    function: Function
    residual: Function | None
    proposal: Function | None
    arrays: str
    vectorised: bool
    knob: str | None
    knob_range: tuple[float, float] | None
    budget: str | None
    declared: dict[str, Any]


class Questions(NamedTuple):
    """Rows q and p (R, V), the number of a row for each question, and its token, if any."""

    q: Rows
    p: Rows
    row: Tensor
    token: Tensor | None = None


@lru_cache(maxsize=256)
def parameters(function: Function) -> dict[str, inspect.Parameter]:
    """Return a function's parameters; annotations in text are evaluated where possible."""
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except (NameError, TypeError, SyntaxError):  # text that only a type checker can read
        return dict(inspect.signature(function).parameters)


@dataclasses.dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A policy that calls plain functions.

    ``home`` is the name it is registered under, or the ``FILE.py:NAME`` it was read from.
    """

    source: Source
    values: tuple[tuple[str, Any], ...]
    home: str = ""

    def __call__(self, *arguments: Any, **knobs: Any) -> Any:
        return self.source.function(*arguments, **{**dict(self.values), **knobs})

    @property
    def function(self) -> Function:
        return self.source.function

    @property
    def summary(self) -> str:
        """Return the first line of the function's docstring, or its name."""
        return (self.function.__doc__ or self.function.__name__).strip().splitlines()[0]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the registered name, ``FILE.py:NAME``, or else the function's name."""
        return self.home or self.source.function.__name__

    @property
    def knob(self) -> str | None:  # type: ignore[override]
        return self.source.knob

    @property
    def spec(self) -> str:
        knobs = ",".join(f"{name}={value}" for name, value in self.values)
        return ":".join(filter(None, [self.name, knobs]))

    def knobs_of_function(self) -> dict[str, _knobs.Knob]:
        """Return the knobs with their types: the annotation's, or else the default's."""
        declared = parameters(self.source.function)
        knobs = {}
        for name, value in self.values:
            parameter = declared[name]
            kind = parameter.annotation
            if kind is parameter.empty or isinstance(kind, str):
                kind = _knobs.type_of(parameter.default)
            knobs[name] = _knobs.Knob(kind, value)
        return knobs

    def with_knobs(self, **knobs: Any) -> "FunctionPolicy":
        """Return the policy at other values of its knobs."""
        known = self.knobs_of_function()
        values = dict(self.values)
        for name, value in knobs.items():
            check.one_of("knob", name, tuple(known))
            values[name] = _knobs.converted(name, value, known[name].kind)
        return dataclasses.replace(self, values=tuple(values.items()))

    def registered_under(self, name: str) -> "FunctionPolicy":
        return dataclasses.replace(self, home=name)

    def read_as(self, source: str) -> "FunctionPolicy":
        """Return the policy with a spec that begins with ``FILE.py:NAME``."""
        return dataclasses.replace(self, home=source) if not self.home else self

    @property
    def declares(self) -> Declaration:
        """Return the decorator's declaration, with the budget at the current knob values."""
        text = self.source.budget
        budget = None if text is None else read_budget(text, dict(self.values))
        return Declaration(budget=budget, **self.source.declared)

    def _answers(self, function: Function, questions: Questions, shape: Shape) -> Tensor:
        """Call ``function`` on the questions; return (questions, *shape) float64."""
        names = parameters(function)
        knobs = {name: value for name, value in self.values if name in names}
        call = self._call_at_once if self.source.vectorised else self._call_singly
        if not len(questions.row):
            return torch.zeros((0, *shape), dtype=torch.float64, device=questions.q.device)
        name = function.__name__
        name = name if function is self.source.function else f"{self.name}, {name}"
        answers = call(lambda *row: function(*row, **knobs), name, questions, shape)
        if not shape:
            return numbers(name, answers, True)
        return answers if function is self.source.proposal else lawful(name, answers)

    def _call_singly(
        self, function: Function, name: str, questions: Questions, shape: Shape
    ) -> Tensor:
        start = time.monotonic()
        q, p, rows, tokens = questions
        ids = None if tokens is None else tokens.tolist()
        answers = []
        with lent(name, self._array(q), self._array(p)) as (q_rows, p_rows):
            for i, row in enumerate(rows.tolist()):
                token = () if ids is None else (ids[i],)
                answers.append(_as_tensor(function(q_rows[row], p_rows[row], *token)))
                if tuple(answers[-1].shape) != shape:
                    due = f"a row of {shape[0]} numbers" if shape else "one number"
                    raise ValueError(
                        f"{name}: must return {due}; got shape {tuple(answers[-1].shape)}"
                    )
        taken = time.monotonic() - start
        if taken > SLOW_SECONDS:
            warnings.warn(
                f"{name}: took {taken:.0f} s for {len(answers):,} questions; {VECTORISE}",
                stacklevel=2,
            )
        return torch.stack(answers).to(q.device)

    def _call_at_once(
        self, function: Function, name: str, questions: Questions, shape: Shape
    ) -> Tensor:
        q, p, rows, tokens = questions
        answers = []
        step = max(1, ENTRIES // q.shape[-1])
        for first in range(0, len(rows), step):
            row = rows[first : first + step]
            token = () if tokens is None else (self._array(tokens[first : first + step]),)
            pair = (self._array(_picked(part, row)) for part in (q, p))
            with lent(name, *pair, *token) as copies:
                answer = _as_tensor(function(*copies))
            if tuple(answer.shape) != (len(row), *shape):
                due = (len(row), *shape)
                raise ValueError(f"{name}: must return shape {due}; got {tuple(answer.shape)}")
            answers.append(answer)
        return torch.cat(answers).to(q.device)

    def _array(self, value: Tensor) -> Any:
        return value.detach().cpu().numpy() if self.source.arrays == "numpy" else value


def _as_tensor(answer: Any) -> Tensor:
    if isinstance(answer, Tensor):  # a copy, as the function may write into its tensor again
        return answer.detach().to(torch.float64, copy=True)
    return torch.from_numpy(np.array(answer, dtype=np.float64))


def _picked(rows: Tensor, row: Tensor) -> Tensor:
    """Return rows (R, V) by number; no copy if all are one row, or every row in order."""
    if bool((row == row[0]).all()):
        return rows[row[0]].expand(len(row), -1)
    every = torch.arange(len(rows), device=rows.device)
    return rows if torch.equal(row, every) else rows[row]


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1])


class FunctionRule(FunctionPolicy):
    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return the function's acceptance; the function is not called for tokens with p = 0."""
        q, p = ungraphed(q), ungraphed(p)
        phi = (q.gather(-1, n) > 0).double()
        drafted = p.expand(q.shape).gather(-1, n) > 0
        row = torch.arange(n.numel(), device=n.device).reshape(n.shape) // max(1, n.shape[-1])
        questions = Questions(_flat(q), _flat(p.expand(q.shape)), row[drafted], n[drafted])
        phi[drafted] = self._answers(self.source.function, questions, ())
        return phi

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Call ``residual`` where n can be rejected; return q elsewhere."""
        q, drafts = ungraphed(q), ungraphed(p).to(q.dtype)
        if self.source.residual is None:
            rows = q.double()
            return normalised_or((rows - drafts.double()).clamp(min=0.0), rows)
        phi = self.acceptance(q, drafts, n[..., None]).reshape(-1)
        out = _flat(q).double().clone()
        refused = (~(phi >= 1)).nonzero()[:, 0]
        token = None if isinstance(self, SharedResidual) else n.reshape(-1)[refused]
        questions = Questions(_flat(q), _flat(drafts), refused, token)
        out[refused] = self._answers(self.source.residual, questions, q.shape[-1:])
        return out.reshape(q.shape)

    def _recovered(
        self, q: Float[Tensor, "vocab"], p: Float[Tensor, "vocab"], n: Int[Tensor, "m"]
    ) -> Float[Tensor, "m vocab"]:
        """Call ``residual`` for tokens (m,) of one row that may be refused; return (m, V)."""
        assert self.source.residual is not None  # SharedFunctionRule if there is none
        questions = Questions(q[None], p[None], torch.zeros_like(n), n)
        return self._answers(self.source.residual, questions, q.shape)

    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"] | None:
        """Call ``proposal``, None without one; return q for tokens with p = 0."""
        if self.source.proposal is None:
            return None
        q, p = float64_rows(q, p)
        rows = q[..., None, :].expand(*n.shape, q.shape[-1]).clone()
        drafted = p.expand(q.shape).gather(-1, n) > 0
        row = torch.arange(n.numel(), device=n.device).reshape(n.shape) // max(1, n.shape[-1])
        questions = Questions(_flat(q), _flat(p.expand(q.shape)), row[drafted], n[drafted])
        rows[drafted] = self._answers(self.source.proposal, questions, q.shape[-1:])
        return rows


class SharedFunctionRule(SharedResidual, FunctionRule):
    """A function's policy with one residual for every refused token: the default, or f(q, p)."""


class FunctionTarget(FunctionPolicy, FixedTarget):
    """A policy that emits a row given by a plain function of (q, p)."""

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        q, p = torch.broadcast_tensors(q, p)
        every = torch.arange(q.shape[:-1].numel(), device=q.device)
        questions = Questions(_flat(q), _flat(p), every)
        return self._answers(self.source.function, questions, q.shape[-1:]).reshape(q.shape)


def read_budget(text: str, knobs: dict[str, Any]) -> Budget:
    """Return the budget of a text such as ``"kl <= delta emitted"``, at these knob values."""
    divergence, least, rest = text.partition("<=")
    amount, _, scope = rest.strip().partition(" ")
    if not least or not scope:
        raise ValueError(
            'budget: must read like "kl <= 0.1 emitted" or "kl <= delta per proposal"; '
            f"got {text!r}"
        )
    value = knobs.get(amount, amount)
    check.one_of("budget", scope.strip(), ("emitted", "per proposal"))
    return Budget(divergence.strip(), check.number("budget", value, 0), scope.strip())  # type: ignore[arg-type]
