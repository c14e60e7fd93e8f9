"""Compute a policy's φ, residual g and emitted law on rows; list knob values to check it at."""

import math
import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cactus_theory.policies import Policy, read_policy
from cactus_theory.testing.definition import WIDEST, Measure, Properties, Seen, always

# largest V for properties that take little time on the widest rows: that of a real vocabulary
REAL = 200_000
# if changing a row's entries by AWAY (relative) moves an answer by more than JUMP, a jump is near
AWAY = 1e-4
JUMP = 1e-2


class Behaviour(Seen):
    """Results of a policy's methods on rows q and p (R, V); each is computed once and kept.

    Attributes
    ----------
    policy : the policy.
    q, p : target rows and draft rows, (R, V).
    drafted : (R, V) whether the draft can propose the token: p > 0.
    knobs : values of knobs that were changed; empty for the policy that the user gave.

    Examples
    --------
    >>> q, p = torch.tensor([[0.2, 0.8]]).double(), torch.tensor([[0.8, 0.2]]).double()
    >>> seen = Behaviour(ct.policy("speculative"), q, p)
    >>> seen.phi
    tensor([[0.2500, 1.0000]], dtype=torch.float64)
    >>> seen.emitted
    tensor([[0.2000, 0.8000]], dtype=torch.float64)
    """

    def __init__(
        self,
        policy: Policy,
        q: Tensor,
        p: Tensor,
        knobs: dict[str, float] | None = None,
    ) -> None:
        self.policy, self.q, self.p = policy, q, p
        self.drafted, self.width = p > 0, q.shape[-1]
        self.knobs = knobs or {}

    def on(self, q: Tensor, p: Tensor, *, policy: Policy | None = None) -> "Behaviour":
        """Return the behaviour on other rows, of ``policy`` if one is given."""
        return Behaviour(self.policy if policy is None else policy, q, p, self.knobs)

    @property
    def tokens(self) -> Tensor:
        """Return the token ids 0 … V−1 for every row, (R, V)."""
        return torch.arange(self.q.shape[-1]).expand(self.q.shape)

    @cached_property
    def phi(self) -> Tensor:
        """Return the acceptance probability φ of every token if drafted, (R, V) float64."""
        phi = self.policy.acceptance(self.q, self.p, self.tokens)
        return shaped("acceptance", phi, self.q.shape)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return row numbers (rising) and ids of all tokens that can be drafted, (N,) each."""
        row, token = self.drafted.nonzero(as_tuple=True)
        return row, token

    @cached_property
    def recovered(self) -> Tensor:
        """Return the residual distribution g(·|n) for each of :attr:`pairs`, (N, V) float64."""
        row, token = self.pairs
        answer = self.policy.residual(self.q[row], self.p[row], token)
        return shaped("residual", answer, (len(row), self.q.shape[-1]))

    def recovered_at(self, row: Tensor, token: Tensor) -> Tensor:
        """Return g(·|token) for row and token numbers of any shape (...), as (..., V)."""
        places = torch.zeros(self.q.shape, dtype=torch.int64)
        places[self.drafted] = torch.arange(len(self.pairs[0]))
        return self.recovered[places[row, token]]

    @cached_property
    def rejected(self) -> Tensor:
        """Return the probability p(1 − φ) that each token is drafted and rejected, (R, V)."""
        return torch.where(self.drafted, self.p.double() * (1 - self.phi), 0.0)

    @cached_property
    def accepted(self) -> Tensor:
        """Return the probability pφ that each token is drafted and accepted, (R, V)."""
        return torch.where(self.drafted, self.p.double() * self.phi, 0.0)

    @cached_property
    def emitted(self) -> Tensor:
        """Return the emitted law by its definition pφ + Σ p_n (1 − φ(n)) g(·|n), (R, V)."""
        row, token = self.pairs
        lost = self.rejected[row, token][:, None]
        return self.accepted.index_add(0, row, torch.where(lost != 0, lost * self.recovered, 0.0))

    @cached_property
    def steady(self) -> Tensor:
        """Return (R,) whether the policy is continuous near each row.

        A policy that declares no jumps is continuous everywhere. Otherwise a jump is near if
        changing the row's entries by 1e-4 (relative) moves pφ or the emitted law by over 0.01.
        """
        steady = torch.ones(len(self.q), dtype=torch.bool)
        if self.policy.declares.continuous:
            return steady
        sign = 1 - 2 * (self.tokens % 2).double()
        # neighbours are moved apart, in both directions; the third time token 0 stays
        for move in (AWAY * sign, -AWAY * sign, AWAY * sign.roll(1, -1) * (self.tokens > 0)):
            q, p = (row * (1 + move) for row in (self.q, self.p))
            other = self.on(q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True))
            for mine, moved in ((self.accepted, other.accepted), (self.emitted, other.emitted)):
                steady &= ~((mine - moved).abs().amax(-1) > JUMP)
        return steady


PROPERTIES = Properties("policy_property")
"""Every property of policies, by name."""


def policy_property(
    applies: Callable[[Policy], bool] = always,
    *,
    hint: str = "",
    steady: bool = False,
    at_other_knobs: bool = True,
    widest: int = WIDEST,
) -> Callable[[Measure], Measure]:
    """Return a decorator that registers a function as a property of policies.

    The function takes a :class:`Behaviour` and yields :class:`Bounds`. The first paragraph of the
    function's docstring is the statement that reports print. Every check and test suite then
    includes the property, under the function's name.

    Parameters
    ----------
    applies : function of a policy: whether the policy must have the property.
    hint : the likeliest cause of a failure, in words.
    steady : whether a policy with jumps is judged only on rows that are not close to a jump.
    at_other_knobs : whether the property is also checked at further values of the policy's knob.
    widest : the largest V on which the property is checked.

    Raises
    ------
    TypeError, ValueError
        The decorator is used without parentheses, the function has no docstring, or a property of
        the same name is registered already.

    Examples
    --------
    >>> @policy_property(hint="the row is not sorted")
    ... def keeps_the_likeliest(seen):
    ...     "The target's likeliest token is always accepted."
    ...     best = seen.q.argmax(-1, keepdim=True)
    ...     yield Bounds(seen.phi.gather(-1, best), 1, 1, "acceptance of the likeliest token")
    >>> names = ["keeps_the_likeliest"]
    >>> assert_policy_properties("top_k:k=1", properties=names, examples=10).passed
    True
    """
    return PROPERTIES.register(
        applies, hint=hint, steady=steady, at_other_knobs=at_other_knobs, widest=widest
    )


def of_token(token: Tensor, text: str) -> Callable[[tuple[int, ...]], str]:
    """Return a function that names an entry by its index: ``text``, {n} being the drafted token."""
    return lambda index: text.format(*index[1:], n=int(token[index[0]]))


def residual_entry(seen: Behaviour, more: str = "") -> Callable[[tuple[int, ...]], str]:
    """Return a function from an index of ``seen.recovered`` to the entry's name and ``more``."""
    return of_token(seen.pairs[1], f"residual probability of token {{0}} after token {{n}}{more}")


def shaped(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a policy's answer as float64; raise an error if its type or its shape is wrong."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: must return a torch tensor; got {type(value).__name__}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: must return shape {tuple(shape)}; got {tuple(value.shape)}")
    return value.detach().double()


# knob values at which a registered policy is checked, as far as its range allows them
KNOB_VALUES = (0.0, 0.1, 0.3, 0.7, 1.0, 3.0, float("inf"))
WHOLE_VALUES = (0, 1, 2, 3, 5, 8, 20)
# knob values for a plain function under @ct.rule, in multiples of the knob's present value
FACTORS = (0.5, 1.0, 2.0)
# knob values for a plain function whose knob is 0
FROM_ZERO = (0.0, 0.1, 1.0)
# largest drawn knob value, in multiples of the last finite one
BEYOND = 4.0
# number of drawn knob values in each gap of the ladder, one in each half of the gap
BETWEEN = 2


def at_knob(policy: Policy, value: float) -> Policy | None:
    """Return the policy with its knob at ``value``, None outside the knob's range."""
    if policy.knob is None:
        return None
    try:
        return read_policy(policy, **{policy.knob: value})
    except (TypeError, ValueError):
        return None


def knob_ladder(policy: Policy, between: int = 0, seed: int = 0) -> list[tuple[float, Policy]]:
    """Return the policy at rising values of its knob, the present value among them.

    The result holds pairs (value, policy); it is empty if the policy's knob is no number.
    Registered policies are tried at fixed values inside the knob's range. A plain function under
    ``@ct.rule`` is tried at ½, 1 and 2 times the present value (at 0, 0.1 and 1 if this is 0 and
    there is no ``knob_range``), at the declared lossless value and at the ends of ``knob_range``.
    An integer knob only takes integers. Each gap between neighbours is cut into ``between`` parts,
    and a value drawn from each part is added.
    """
    value = None if policy.knob is None else getattr(policy, policy.knob, None)
    if isinstance(value, bool) or not isinstance(value, int | float):  # no number, or no knob
        return []
    whole = isinstance(value, int)

    def made(values: set[float]) -> dict[float, Policy]:
        """Return the policy at each allowed value; an integer knob takes integers."""
        if whole:
            values = {float(round(x)) for x in values if math.isfinite(x)}
        rungs = {x: at_knob(policy, int(x) if whole else x) for x in map(float, values)}
        return {x: rung for x, rung in rungs.items() if rung is not None}

    rungs = made(_fixed(policy, value, whole) | {value})
    if between and rungs:
        rungs |= made(_drawn(sorted(rungs), between, seed) - set(rungs))
    return sorted(rungs.items())


def other_knobs(policy: Policy, seed: int = 0) -> list[tuple[float, Policy]]:
    """Return (value, policy) at values drawn inside every gap of the :func:`knob_ladder`.

    Empty for a plain function that declares nothing about its knob: no ``direction``, no ``strict``
    (the value at which the function is lossless) and no ``knob_range``.
    """
    source = getattr(policy, "source", None)
    claims = policy.declares
    if source is not None and not (
        claims.direction or claims.strict is not None or source.knob_range
    ):
        return []
    fixed = {value for value, _ in knob_ladder(policy)}
    return [rung for rung in knob_ladder(policy, BETWEEN, seed) if rung[0] not in fixed]


def _fixed(policy: Policy, value: float, whole: bool) -> set[float]:
    """Return the values of the knob that are tried whatever the seed; see :func:`knob_ladder`."""
    source = getattr(policy, "source", None)
    if source is None:
        return set(WHOLE_VALUES if whole else KNOB_VALUES)
    low, high = source.knob_range or (-math.inf, math.inf)
    from_zero = not value and not source.knob_range  # multiples of 0 would all be 0
    values = set(FROM_ZERO) if from_zero else {value * factor for factor in FACTORS}
    values |= set(source.knob_range or ())
    if policy.declares.strict is not None:  # the value at which the function is lossless
        values.add(policy.declares.strict)
    return {value for value in values if low <= value <= high}


def _drawn(rungs: list[float], between: int, seed: int) -> set[float]:
    """Return ``between`` drawn values inside every gap of the rising values ``rungs``."""
    draw, values = random.Random(seed), set[float]()
    for low, high in zip(rungs, rungs[1:], strict=False):
        if math.isfinite(low):
            top = high if math.isfinite(high) else max(BEYOND * low, low + BEYOND)
            step = (top - low) / between
            values |= {low + step * (part + draw.random()) for part in range(between)}
    return values
