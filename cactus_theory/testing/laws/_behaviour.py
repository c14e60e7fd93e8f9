"""What a rule does on a batch of rows: every φ, every g and the emitted law."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.testing._property import WIDEST, Measure, Properties, Seen, always
from cactus_theory.verify import verify_block, verify_chain

# as wide as real vocabularies, for properties that cost O(V) a drafted token
REAL = 200_000
# a rule with jumps is judged only where moving the rows by this much (relative) changes nothing
AWAY = 1e-4
JUMP = 1e-2


class Behaviour(Seen):
    """A rule on rows q and p (R, V); every answer is computed once and kept.

    Attributes
    ----------
    rule, q, p : as given. ``verify`` : the verification step to check with the rule.
    drafted : (R, V) whether the draft can propose the token.
    knobs : what was changed to get ``rule`` from the policy that is being checked.

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
        rule: Policy,
        q: Tensor,
        p: Tensor,
        verify: Callable[..., Any] | None = None,
        knobs: dict[str, float] | None = None,
    ) -> None:
        self.rule, self.q, self.p = rule, q, p
        # one drafted token is the shortest block
        self.verify = verify or (verify_block if rule.needs_path else verify_chain)
        self.drafted, self.width = p > 0, q.shape[-1]
        self.knobs = knobs or {}

    def on(self, q: Tensor, p: Tensor, *, rule: Policy | None = None) -> "Behaviour":
        """Return the behaviour on other rows, or of another rule."""
        return Behaviour(self.rule if rule is None else rule, q, p, self.verify, self.knobs)

    @property
    def tokens(self) -> Tensor:
        """Return 0 … V−1 for every row, (R, V)."""
        return torch.arange(self.q.shape[-1]).expand(self.q.shape)

    @cached_property
    def phi(self) -> Tensor:
        """Return φ of every token, (R, V) float64."""
        return shaped("acceptance", self.rule.acceptance(self.q, self.p, self.tokens), self.q.shape)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return (row, token) of everything that can be drafted, (N,) each, rows rising."""
        row, token = self.drafted.nonzero(as_tuple=True)
        return row, token

    @cached_property
    def recovered(self) -> Tensor:
        """Return g(·|n) for each of :attr:`pairs`, (N, V) float64."""
        row, token = self.pairs
        answer = self.rule.recovery(self.q[row], self.p[row], token)
        return shaped("recovery", answer, (len(row), self.q.shape[-1]))

    def recovered_at(self, row: Tensor, token: Tensor) -> Tensor:
        """Return g(·|token) of drafted tokens, (..., V) for row and token (...)."""
        places = torch.zeros(self.q.shape, dtype=torch.int64)
        places[self.drafted] = torch.arange(len(self.pairs[0]))
        return self.recovered[places[row, token]]

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
        """Return the emitted law by its definition, (R, V)."""
        row, token = self.pairs
        lost = self.rejected[row, token][:, None]
        return self.kept.index_add(0, row, torch.where(lost != 0, lost * self.recovered, 0.0))

    @cached_property
    def steady(self) -> Tensor:
        """Return (R,) whether the rule is continuous here: everywhere, or away from its jumps."""
        if self.rule.declares.continuous:
            return torch.ones(len(self.q), dtype=torch.bool)
        return ~self.jumps

    @cached_property
    def jumps(self) -> Tensor:
        """Return (R,) whether moving the rows by 1e-4 (relative) moves an answer by over 0.01."""
        steady = torch.ones(len(self.q), dtype=torch.bool)
        sign = 1 - 2 * (self.tokens % 2).double()
        for move in (AWAY * sign, -AWAY * sign, AWAY * sign.roll(1, -1) * (self.tokens > 0)):
            q, p = (row * (1 + move) for row in (self.q, self.p))
            other = self.on(q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True))
            for mine, moved in ((self.kept, other.kept), (self.emitted, other.emitted)):
                steady &= ~((mine - moved).abs().amax(-1) > JUMP)
        return ~steady


LAWS = Properties("law")


def law(
    applies: Callable[[Policy], bool] = always,
    *,
    hint: str = "",
    steady: bool = False,
    at_other_knobs: bool = True,
    widest: int = WIDEST,
) -> Callable[[Measure], Measure]:
    """Register a function as a property; its docstring is the statement.

    The function takes a :class:`Behaviour` and yields :class:`Bounds`; the options are the
    fields of :class:`Property`. Every check, test suite and page picks it up by its name.

    Raises
    ------
    TypeError, ValueError
        Used without parentheses; a function without a docstring, or a name that is taken.

    Examples
    --------
    >>> @policy_property(hint="the row is not sorted")
    ... def keeps_the_likeliest(seen):
    ...     "The target's likeliest token is always kept."
    ...     best = seen.q.argmax(-1, keepdim=True)
    ...     yield Bounds(seen.phi.gather(-1, best), 1, 1, "acceptance of the likeliest token")
    >>> "keeps_the_likeliest" in PROPERTIES
    True
    """
    return LAWS.enter(
        applies, hint=hint, steady=steady, at_other_knobs=at_other_knobs, widest=widest
    )


def of_token(token: Tensor, text: str) -> Callable[[tuple[int, ...]], str]:
    """Return what names an entry whose first index counts drafted tokens: ``{n}`` is its token."""
    return lambda index: text.format(*index[1:], n=int(token[index[0]]))


def recovery_entry(seen: Behaviour, more: str = "") -> Callable[[tuple[int, ...]], str]:
    """Return what names an entry of ``seen.recovered``."""
    return of_token(seen.pairs[1], f"recovery probability of token {{0}} after token {{n}}{more}")


def shaped(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a rule's answer as float64, or raise an error that tells its author what to mend."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: must return a torch tensor; got {type(value).__name__}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: must return shape {tuple(shape)}; got {tuple(value.shape)}")
    return value.detach().double()
