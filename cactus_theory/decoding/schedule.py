"""Policies that change along a text: what they may depend on, and a change by position."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory._specs import names_a_file
from cactus_theory.decoding._checks import whole_number
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.policies._registry import policy_in_file
from cactus_theory.verify.contract import Verifier

Spec = str | Policy


class Schedule(ABC):
    """Chooses among a few policies for every drafted token, from the tokens before it.

    Attributes
    ----------
    rules : the policies chosen from.

    Examples
    --------
    >>> class Alternating(Schedule):
    ...     rules = (ct.policy("speculative"), ct.policy("band:price=1"))
    ...     def begin(self, prompt):
    ...         return 0
    ...     def advance(self, state, new_ids):
    ...         return state + len(new_ids)
    ...     def choose(self, state, drafted):
    ...         return (state + torch.arange(len(drafted))) % 2
    >>> Alternating().choose(3, torch.tensor([7, 7]))
    tensor([1, 0])
    """

    rules: tuple[Policy, ...]

    @property
    def spec(self) -> str:
        """Return a line that tells the schedule from others where results name it."""
        return f"{type(self).__name__}({', '.join(rule.spec for rule in self.rules)})"

    def check(self, verifier: Verifier) -> None:
        """Raise ValueError for a verifier that cannot follow the schedule's policies.

        A subclass may also refuse those under which its guarantee would not hold.
        """
        for rule in self.rules:
            verifier.check(rule)

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
        was spent. The rows are those up to and including the first refusal; they know the
        policy that judged each (``rows.policies``) and what it was charged (``rows.charges``).
        """
        return state


class ByPosition(Schedule):
    """A sequence of policies, each from a number of new tokens on.

    ``ByPosition([(0, "speculative"), (32, "band:price=2")])`` is lossless for the first 32
    tokens of the answer.

    Raises
    ------
    ValueError
        Positions that do not start at 0 and rise, an unknown policy.

    Examples
    --------
    >>> later = ByPosition([(0, "speculative"), (32, "band:price=2")])
    >>> later.choose(31, torch.tensor([7, 7])).tolist()
    [0, 1]
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


def find_rule(spec: Spec | Schedule, **knobs: Any) -> Policy | Schedule:
    """Return what a policy's spec names, or the schedule that ``FILE.py:NAME`` stands for.

    Parameters of a schedule's class are its knobs.

    Raises
    ------
    ValueError, TypeError, OSError
        As :func:`cactus_theory.policy`.
    """
    if isinstance(spec, Schedule) and not knobs:
        return spec
    if isinstance(spec, str) and names_a_file(spec):
        return policy_in_file(spec, knobs, Schedule)
    return find_policy(spec, **knobs)  # type: ignore[arg-type]


def check_followed(rule: Policy | Schedule, verifier: Verifier) -> None:
    """Raise ValueError for a policy or a schedule that the verifier cannot follow."""
    rule.check(verifier) if isinstance(rule, Schedule) else verifier.check(rule)


def check_bonus_is_free(schedule: str, verifier: Verifier) -> None:
    """Raise for a verifier that charges bonus tokens, whose row no schedule has seen.

    Raises
    ------
    ValueError
        ``block:bonus=policy``: the bonus follows the policy of the last drafted token.
    """
    if verifier.needs_next_draft_row:
        raise ValueError(
            f"verifier: {schedule} needs bonus tokens from the target's row, which are free; "
            f"got {verifier.spec!r}"
        )
