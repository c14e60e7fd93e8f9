"""What a rule does on a batch of rows: every φ, every g and the law they add up to."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.verify import verify_chain

# a rule with jumps is judged only where moving the rows by this much (relative) changes nothing
AWAY = 1e-4
JUMP = 1e-2
# values at which a registered rule's knob is tried; those outside its range are left out
KNOB_VALUES = (0.0, 0.1, 0.3, 0.7, 1.0, 3.0, float("inf"))
FACTORS = (0.5, 1.0, 2.0)


class Behaviour:
    """A rule on rows q and p (R, V), each asked once and kept.

    Attributes
    ----------
    rule, q, p : as given. ``verify`` : the verification step that is to follow the rule.
    drafted : (R, V) whether the draft can propose the token.
    """

    def __init__(
        self, rule: Policy, q: Tensor, p: Tensor, verify: Callable[..., Any] = verify_chain
    ) -> None:
        self.rule, self.q, self.p, self.verify = rule, q, p, verify
        self.drafted = p > 0

    def on(self, q: Tensor, p: Tensor, *, rule: Policy | None = None) -> "Behaviour":
        """Return the behaviour on other rows, or of another rule."""
        return Behaviour(self.rule if rule is None else rule, q, p, self.verify)

    @property
    def tokens(self) -> Tensor:
        """Return 0 … V−1 for every row, (R, V)."""
        return torch.arange(self.q.shape[-1]).expand(self.q.shape)

    @cached_property
    def phi(self) -> Tensor:
        """Return φ of every token, (R, V) float64."""
        return shaped("acceptance", self.rule.acceptance(self.q, self.p, self.tokens), self.q.shape)

    @cached_property
    def recovered(self) -> Tensor:
        """Return g(·|n), (R, V, V) float64; q where n cannot be drafted."""
        vocab = self.q.shape[-1]
        rows = self.q.double()[:, None, :].repeat(1, vocab, 1)
        at = self.drafted.nonzero()
        ask = (self.q[at[:, 0]], self.p[at[:, 0]], at[:, 1])
        rows[self.drafted] = shaped("recovery", self.rule.recovery(*ask), (len(at), vocab))
        return rows

    @cached_property
    def rejected(self) -> Tensor:
        """Return p(1 − φ), (R, V)."""
        return torch.where(self.drafted, self.p.double() * (1 - self.phi), 0.0)

    @cached_property
    def kept(self) -> Tensor:
        """Return pφ, (R, V)."""
        return torch.where(self.drafted, self.p.double() * self.phi, 0.0)

    @cached_property
    def emitted(self) -> Tensor:
        """Return the law of the emitted token by its definition, (R, V)."""
        moved = self.rejected[..., None] * self.recovered
        return self.kept + torch.where(self.rejected[..., None] != 0, moved, 0.0).sum(1)

    @cached_property
    def steady(self) -> Tensor:
        """Return (R,) whether the rule is continuous here: everywhere, or away from its jumps."""
        steady = torch.ones(len(self.q), dtype=torch.bool)
        if self.rule.declares.continuous:
            return steady
        sign = 1 - 2 * (self.tokens % 2).double()
        for move in (AWAY * sign, -AWAY * sign, AWAY * sign.roll(1, -1) * (self.tokens > 0)):
            q, p = (row * (1 + move) for row in (self.q, self.p))
            other = self.on(q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True))
            for mine, moved in ((self.kept, other.kept), (self.emitted, other.emitted)):
                steady &= ~((mine - moved).abs().amax(-1) > JUMP)
        return steady


def shaped(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a rule's answer as float64, or raise what a rule's author can act on."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: must return a torch tensor; got {type(value).__name__}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: must return shape {tuple(shape)}; got {tuple(value.shape)}")
    return value.detach().double()


def at_knob(rule: Policy, value: float) -> Policy | None:
    """Return the rule with its knob at ``value``, None outside the knob's range."""
    if rule.knob is None:
        return None
    try:
        if hasattr(rule, "with_knobs"):
            return rule.with_knobs(**{rule.knob: value})  # type: ignore[attr-defined]
        return dataclasses.replace(rule, **{rule.knob: value})  # type: ignore[type-var]
    except (TypeError, ValueError):
        return None


def knob_ladder(rule: Policy) -> list[tuple[float, Policy]]:
    """Return (value, rule) at rising values of the knob, its own among them.

    A registered rule refuses values outside its range. A plain function cannot: it is tried
    at ½, 1 and 2 times its own value, at its strict point and at the ends of ``knob_range``.
    """
    if rule.knob is None:
        return []
    own = getattr(rule, rule.knob, None)
    values = set(KNOB_VALUES)
    source = getattr(rule, "source", None)
    if source is not None:
        own = dict(rule.values)[rule.knob]  # type: ignore[attr-defined]
        low, high = source.knob_range or (-float("inf"), float("inf"))
        values = {own * factor for factor in FACTORS} | set(source.knob_range or ())
        values |= {rule.declares.strict} if rule.declares.strict is not None else set()
        values = {value for value in values if low <= value <= high}
    if not isinstance(own, int | float):
        return []
    rungs = ((value, at_knob(rule, value)) for value in sorted(values | {own}))
    return [(value, made) for value, made in rungs if made is not None]
