"""Turn a plain function into a policy: the decorator :func:`rule`."""

import dataclasses
import difflib
import inspect
from typing import Any, Literal

from cactus_theory.base import arguments as check
from cactus_theory.divergences import divergence as find_divergence
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._user_function import (
    Function,
    FunctionPolicy,
    FunctionRule,
    FunctionTarget,
    SharedFunctionRule,
    Source,
)

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
TRUTHS = ("between", "at_least_speculative", "continuous", "optimal")


def rule(
    function: Function | None = None,
    *,
    residual: Function | None = None,
    proposal: Function | None = None,
    arrays: Literal["numpy", "torch"] | None = None,
    vectorised: bool = False,
    knob: str | None = None,
    knob_range: tuple[float, float] | None = None,
    budget: str | None = None,
    **declared: Any,
) -> Any:
    """Make a policy of a function of three arguments (q, p, n), or of two (q, p).

    * ``f(q, p, n)`` returns the probability of keeping the drafted token n. A rejected token
      is replaced by a draw from ``residual(q, p, n)``, or from ``residual(q, p)`` where n does
      not matter (much faster at a large vocabulary); by default (q − p)₊ normalised.
    * ``f(q, p)`` returns the row h to emit instead of q. Keeping with min(1, h_n/p_n) and
      recovering from (h − p)₊ then follow.

    q and p are rows of V probabilities, n an integer. Keyword-only parameters with defaults
    are knobs, for ``residual`` and ``proposal`` too where they name them. The function is
    called once per row and token: fine for checking an idea, slow in a decode loop.

    Under ``@ct.rule(vectorised=True)`` it is called for many rows at once: q and p have shape
    (..., V) and n (...,), torch tensors unless ``arrays="numpy"``. It returns φ (...,), or h
    (..., V) from (q, p); ``residual`` and ``proposal`` return (..., V). Either way tokens with
    p_n = 0 are left out. Each answer must depend on its own row only (this is tested)::

        @ct.rule(vectorised=True)
        def lossless(q, p, n):
            q_n, p_n = (row.gather(-1, n[..., None])[..., 0] for row in (q, p))
            return (q_n / p_n).clamp(max=1)

    Parameters
    ----------
    arrays : what q and p are, ``numpy`` or ``torch``.
    proposal : (q, p, n) → the row that the drafted token is verified against, for budgets per
        proposal.
    knob : the knob that ``direction``, ``strict`` (the value at which the policy is lossless)
        and ``budget`` refer to; by default the first one. ``knob_range`` : its least and
        largest legal value.
    budget : such as ``"kl <= delta emitted"`` or ``"kl <= 0.1 per proposal"``; a knob may
        stand for the amount.
    **declared : the other fields of :class:`Declaration`: ``direction``, ``strict``,
        ``between``, ``at_least_speculative``, ``continuous``, ``support``, ``optimal``.

    Raises
    ------
    TypeError
        Other numbers of arguments, or a declaration that does not exist.
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
    written = {"residual": residual, "proposal": proposal, "vectorised": vectorised}
    written |= {"arrays": arrays, "knob": knob, "knob_range": knob_range, "budget": budget}
    if function is None:
        return lambda f: rule(f, **written, **declared)
    written["arrays"] = _kind_of_arrays(arrays, vectorised)
    count, knobs = _read(function)
    written["knob"] = named = knob if knob is not None else next(iter(knobs), None)
    if named is not None:
        check.one_of("knob", named, tuple(knobs))
    _check_declared(declared, named)
    if count == 2 and residual is not None:
        raise TypeError("residual: follows from the target row of f(q, p); got one of its own")
    written["knob_range"] = _range(knob_range)
    source = Source(function, **written, declared=declared)
    policy = _class(count, residual)(source, tuple(knobs.items()))
    if (promised := policy.declares.budget) is not None:
        try:
            find_divergence(promised.divergence)
        except ValueError as error:
            raise ValueError(f"budget: {error}; in {budget!r}") from None
    return policy


def _read(function: Function) -> tuple[int, dict[str, Any]]:
    """Return the count of positional arguments of a function, and its knobs with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in POSITIONAL]
    if len(positional) not in (2, 3):
        raise TypeError(
            "function: must take (q, p, n) or (q, p), and knobs after a *; "
            f"got {function.__name__}{inspect.signature(function)}"
        )
    knobs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, value in knobs.items():
        if value is inspect.Parameter.empty:
            raise ValueError(f"function: the knob {name} needs a default value; got none")
    return len(positional), knobs


def _class(count: int, residual: Function | None) -> type[FunctionPolicy]:
    """Return the policy class for a function of ``count`` arguments with this residual."""
    if count == 2:
        return FunctionTarget
    if residual is None:
        return SharedFunctionRule
    kinds = [entry.kind for entry in inspect.signature(residual).parameters.values()]
    row = [kind for kind in kinds if kind in POSITIONAL]
    shared = len(row) == 2 and inspect.Parameter.VAR_POSITIONAL not in kinds
    return SharedFunctionRule if shared else FunctionRule


def _kind_of_arrays(arrays: str | None, vectorised: bool) -> str:
    if not isinstance(vectorised, bool):
        raise ValueError(f"vectorised: must be True or False; got {vectorised!r}")
    if arrays is None:
        return "torch" if vectorised else "numpy"
    return check.one_of("arrays", arrays, ("numpy", "torch"))


def _range(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    if ends is None:
        return None
    try:
        low, high = map(float, ends)
    except (TypeError, ValueError):
        raise ValueError(f"knob_range: must be two numbers (low, high); got {ends!r}") from None
    if not low <= high:
        raise ValueError(f"knob_range: must be two numbers (low, high); got {ends!r}")
    return low, high


def _check_declared(declared: dict[str, Any], knob: str | None) -> None:
    """Raise unless every declared field exists and has a value that it can have."""
    known = {field.name for field in dataclasses.fields(Declaration)} - {"budget"}
    for name in declared.keys() - known:
        options = set(inspect.signature(rule).parameters) - {"function", "declared"}
        close = difflib.get_close_matches(name, known | options, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise TypeError(f"rule: declares one of {', '.join(sorted(known))}; got {name!r}{meant}")
    for name in declared.keys() & set(TRUTHS):
        if not isinstance(declared[name], bool):
            raise ValueError(f"{name}: must be True or False; got {declared[name]!r}")
    if declared.get("direction", 0) not in (-1, 0, 1):
        raise ValueError(f"direction: must be -1, 0 or 1; got {declared['direction']!r}")
    check.one_of("support", declared.get("support", "target"), ("target", "free"))
    strict = declared.get("strict")
    if strict is not None:
        check.number("strict", strict, -float("inf"))
    for name, nothing in (("direction", 0), ("strict", None)):
        if knob is None and declared.get(name, nothing) != nothing:
            raise ValueError(f"{name}: speaks of a knob, and the function has none after a *")
