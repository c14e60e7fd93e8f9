"""Policies that change along a text: relaxed between two markers, or by position."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._checks import whole_number
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy

Spec = str | Policy


class Schedule(ABC):
    """Chooses among a few policies for every drafted token, from the tokens before it.

    Attributes
    ----------
    rules : the policies chosen from.
    """

    rules: tuple[Policy, ...]

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """Return the state after a prompt; every text begins with its own."""

    @abstractmethod
    def advance(self, state: Any, new_ids: Sequence[int]) -> Any:
        """Return the state after more tokens have become part of the text."""

    @abstractmethod
    def choose(self, state: Any, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Return the index of the policy that judges each drafted token.

        The policy of token i may depend on ``drafted[:i]``, not on token i or later ones.
        """

    def choose_by_rows(
        self,
        state: Any,
        drafted: Int[Tensor, "K"],
        target_probs: Float[Tensor, "K vocab"],
        draft_probs: Float[Tensor, "K vocab"],
    ) -> Int[Tensor, "K"]:
        """Return the same, knowing the rows that the tokens are verified on.

        Called instead of :meth:`choose` where a subclass overrides it. The policy of token i may
        depend on ``drafted[:i]`` and on the rows up to and including number i: these are known
        before the token is drawn. Use it for a policy with a state along a block; choices after
        a refused token are never used.
        """
        return self.choose(state, drafted)

    def observe(self, state: Any, rows: VerifiedRows) -> Any:
        """Return the state after a round, given the rows whose emitted divergence counts.

        Called before :meth:`advance` where a subclass overrides it, for example to add up what
        was spent. The rows are those up to and including the first refusal.
        """
        return state


class Between(Schedule):
    """One policy between an opening and a closing marker token, another one elsewhere.

    For example a thinking section decoded faster than the answer after it:
    ``Between("cactus:delta=1", opening=5, closing=6)`` is lossless outside. The policy starts
    with the token after an opening marker and ends with the closing marker itself. Markers in
    the prompt count.
    """

    def __init__(
        self,
        inside: Spec,
        *,
        outside: Spec = "speculative",
        opening: int | Iterable[int],
        closing: int | Iterable[int],
    ) -> None:
        self.rules = (find_policy(outside), find_policy(inside))
        self.opening = _tokens("opening", opening)
        self.closing = _tokens("closing", closing)
        both = sorted(set(self.opening) & set(self.closing))
        if both:
            raise ValueError(f"closing: must differ from opening; got token {both[0]} in both")

    def begin(self, prompt: Sequence[int]) -> bool:
        """Return whether a section is open after the prompt."""
        return self.advance(False, prompt)

    def advance(self, state: bool, new_ids: Sequence[int]) -> bool:
        """Return whether a section is open after more tokens."""
        for token in new_ids:
            state = (state or token in self.opening) and token not in self.closing
        return state

    def choose(self, state: bool, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Return 1 inside a section, else 0."""
        if not len(drafted):
            return drafted
        opened = torch.isin(drafted, drafted.new_tensor(self.opening))
        closed = torch.isin(drafted, drafted.new_tensor(self.closing))
        count = torch.arange(1, len(drafted) + 1, device=drafted.device)
        # the latest marker up to each token, 0 for none; it applies from the next token on
        latest = torch.where(opened | closed, count, 0).cummax(0).values
        before = torch.cat([latest.new_zeros(1), latest[:-1]])
        inside = opened[(before - 1).clamp(min=0)]
        return torch.where(before > 0, inside, torch.full_like(inside, state)).long()


class ByPosition(Schedule):
    """A sequence of policies, each from a number of new tokens on.

    ``ByPosition([(0, "speculative"), (32, "band:price=2")])`` is lossless for the first 32
    tokens of the answer.
    """

    def __init__(self, steps: Sequence[tuple[int, Spec]]) -> None:
        self.starts = tuple(whole_number("steps", start, 0) for start, _ in steps)
        if self.starts[:1] != (0,) or list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"steps: positions must start at 0 and rise; got {self.starts}")
        self.rules = tuple(find_policy(spec) for _, spec in steps)

    def begin(self, prompt: Sequence[int]) -> int:
        """Return 0 new tokens."""
        return 0

    def advance(self, state: int, new_ids: Sequence[int]) -> int:
        """Return the number of new tokens."""
        return state + len(new_ids)

    def choose(self, state: int, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Return the index of the last step that has begun."""
        position = torch.arange(state, state + len(drafted), device=drafted.device)
        return torch.searchsorted(position.new_tensor(self.starts), position, right=True) - 1


def _tokens(name: str, tokens: int | Iterable[int]) -> list[int]:
    given = [tokens] if isinstance(tokens, int) else list(tokens)
    if not given:
        raise ValueError(f"{name}: must name at least one token; got none")
    return [whole_number(name, token, 0) for token in given]
