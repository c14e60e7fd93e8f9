"""Turn a plain function into a policy; see :func:`rule`.

The function sees one row at a time, q and p with V entries, and may be written in numpy or
torch. It is called once per row and drafted token: fine for checking an idea, slow in a
decode loop. A :class:`Policy` subclass works on whole batches.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies._base import (
    FixedTarget,
    Id,
    Ids,
    Policy,
    Rows,
    normalised_or,
)
from cactus_theory.policies._declaration import Budget, Declaration

Function = Callable[..., Any]


def rule(
    function: Function | None = None,
    *,
    recovery: Function | None = None,
    proposal: Function | None = None,
    arrays: Literal["numpy", "torch"] = "numpy",
    knob: str | None = None,
    knob_range: tuple[float, float] | None = None,
    budget: str | None = None,
    **declared: Any,
) -> Any:
    """Make a policy of a function of three arguments (q, p, n), or of two (q, p).

    * ``f(q, p, n)`` returns the probability of keeping the drafted token n. A rejected token
      is replaced by a draw from ``recovery(q, p, n)``, by default (q − p)₊ normalised.
    * ``f(q, p)`` returns the row h to emit instead of q. Keeping with min(1, h_n/p_n) and
      recovering from (h − p)₊ then follow.

    q and p are rows of V probabilities, n an integer. Keyword-only parameters with defaults
    are knobs, for ``recovery`` and ``proposal`` too where they name them.

    Parameters
    ----------
    arrays : what q and p are, ``numpy`` or ``torch``.
    proposal : (q, p, n) → the row behind the drafted token, for budgets per proposal.
    knob : the knob that ``direction``, ``strict`` and ``budget`` speak of; by default the
        first one. ``knob_range`` : its least and largest legal value.
    budget : such as ``"kl <= delta emitted"`` or ``"kl <= 0.1 per proposal"``; a knob may
        stand for the amount.
    **declared : the other fields of :class:`Declaration`: ``direction``, ``strict``,
        ``between``, ``at_least_speculative``, ``continuous``, ``support``, ``optimal``.

    Raises
    ------
    TypeError
        Other numbers of arguments, or a declaration that does not exist.
    ValueError
        A knob or a budget that cannot be read.
    """
    if function is None:
        return lambda f: rule(
            f,
            recovery=recovery,
            proposal=proposal,
            arrays=arrays,
            knob=knob,
            knob_range=knob_range,
            budget=budget,
            **declared,
        )
    check.one_of("arrays", arrays, ("numpy", "torch"))
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) not in (2, 3):
        raise TypeError(
            "function: must take (q, p, n) or (q, p), and knobs after a *; "
            f"got {function.__name__}{inspect.signature(function)}"
        )
    knobs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, value in knobs.items():
        if value is inspect.Parameter.empty:
            raise ValueError(f"function: the knob {name} needs a default value; got none")
    known = {field.name for field in dataclasses.fields(Declaration)} - {"budget"}
    for name in declared.keys() - known:
        raise TypeError(f"rule: declares one of {', '.join(sorted(known))}; got {name!r}")
    named = knob if knob is not None else next(iter(knobs), None)
    if named is not None:
        check.one_of("knob", named, tuple(knobs))
    kind = FunctionTarget if len(positional) == 2 else FunctionRule
    if kind is FunctionTarget and recovery is not None:
        raise TypeError("recovery: follows from the target row of f(q, p); got one of its own")
    made = kind(
        _Source(function, recovery, proposal, arrays, named, knob_range, budget, declared),
        tuple(knobs.items()),
    )
    made.declares  # noqa: B018  a budget that cannot be read raises here
    return made


@dataclasses.dataclass(frozen=True)
class _Source:
    """What the decorator was given."""

    function: Function
    recovery: Function | None
    proposal: Function | None
    arrays: str
    knob: str | None
    knob_range: tuple[float, float] | None
    budget: str | None
    declared: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Function(Policy):
    """A policy that asks plain functions, one row at a time."""

    source: _Source
    values: tuple[tuple[str, Any], ...]

    def __call__(self, *arguments: Any, **knobs: Any) -> Any:
        """Call the function itself."""
        return self.source.function(*arguments, **{**dict(self.values), **knobs})

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the function's name."""
        return self.source.function.__name__

    @property
    def knob(self) -> str | None:  # type: ignore[override]
        """Return the knob that the declaration speaks of."""
        return self.source.knob

    @property
    def spec(self) -> str:
        """Return the function's name and its knobs."""
        knobs = ",".join(f"{name}={value}" for name, value in self.values)
        return ":".join(filter(None, [self.name, knobs]))

    def with_knobs(self, **knobs: Any) -> "_Function":
        """Return the same rule at other values of its knobs."""
        for name in knobs:
            check.one_of("knob", name, tuple(dict(self.values)))
        return dataclasses.replace(self, values=tuple({**dict(self.values), **knobs}.items()))

    @property
    def declares(self) -> Declaration:
        """Return what the decorator says, the budget at this rule's knob."""
        text = self.source.budget
        budget = None if text is None else _budget(text, dict(self.values))
        return Declaration(budget=budget, **self.source.declared)

    def _ask(self, function: Function, *arguments: Any) -> Tensor:
        """Return what ``function`` says of one row, float64, on the CPU."""
        own = inspect.signature(function).parameters
        knobs = {name: value for name, value in self.values if name in own}
        answer = function(*arguments, **knobs)
        if isinstance(answer, Tensor):
            return answer.detach().double()
        return torch.from_numpy(np.array(answer, dtype=np.float64))

    def _row(self, value: Tensor) -> Any:
        return value.numpy() if self.source.arrays == "numpy" else value

    def _each(
        self, function: Function, q: Tensor, p: Tensor, n: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the stacked answers, each of ``shape``, for rows (R, V), and n (R,) or None."""
        answers = []
        for row in range(len(q)):
            one = (self._row(q[row]), self._row(p[row]))
            token = () if n is None else (int(n[row]),)
            answers.append(self._ask(function, *one, *token))
            found = tuple(answers[-1].shape)
            if found != shape:
                wanted = f"a row of {shape[0]} numbers" if shape else "one number"
                raise ValueError(f"{function.__name__}: must return {wanted}; got shape {found}")
        return torch.stack(answers)


class FunctionRule(_Function):
    """A policy whose acceptance is a plain function of (q, p, n)."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return what the function says; tokens with p = 0 are not asked for."""
        wide = q[..., None, :].expand(*n.shape, q.shape[-1])
        drafts = p[..., None, :].expand(wide.shape)
        drafted = drafts.gather(-1, n[..., None])[..., 0] > 0
        phi = (q.gather(-1, n) > 0).double()
        phi[drafted] = self._ask_tokens(
            self.source.function, wide[drafted], drafts[drafted], n[drafted], ()
        )
        return phi

    def recovery(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return what ``recovery`` says where n can be rejected, q elsewhere."""
        drafts = p.to(q.dtype)
        if self.source.recovery is None:
            rows, own = q.double(), drafts.double()
            return normalised_or((rows - own).clamp(min=0.0), rows)
        phi = self.acceptance(q, drafts, n[..., None]).reshape(-1)
        flat_q, flat_p = (row.reshape(-1, q.shape[-1]) for row in (q, drafts))
        out = flat_q.double().clone()
        refused = (~(phi >= 1)).nonzero()[:, 0]
        if len(refused):
            ids = n.reshape(-1)[refused]
            rows = flat_q[refused], flat_p[refused]
            out[refused] = self._each(self.source.recovery, *rows, ids, q.shape[-1:])
        return out.reshape(q.shape)

    def proposal(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m vocab"] | None:
        """Return what ``proposal`` says, None without one."""
        if self.source.proposal is None:
            return None
        wide = q[..., None, :].expand(*n.shape, q.shape[-1])
        rows = (wide, p[..., None, :].expand(wide.shape))
        answers = self._ask_tokens(self.source.proposal, *rows, n, q.shape[-1:])
        return answers.reshape(wide.shape)

    def _ask_tokens(
        self, function: Function, q: Tensor, p: Tensor, n: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        vocab = q.shape[-1]
        if not n.numel():
            return torch.zeros((*n.shape, *shape), dtype=torch.float64)
        flat = q.reshape(-1, vocab), p.reshape(-1, vocab)
        return self._each(function, *flat, n.reshape(-1), shape)


class FunctionTarget(_Function, FixedTarget):
    """A policy that emits a row given by a plain function of (q, p)."""

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return the function's row for every row."""
        flat_q, flat_p = (row.reshape(-1, row.shape[-1]) for row in torch.broadcast_tensors(q, p))
        return self._each(self.source.function, flat_q, flat_p, None, q.shape[-1:]).reshape(q.shape)


def _budget(text: str, knobs: dict[str, Any]) -> Budget:
    """Read ``"kl <= delta emitted"``."""
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
