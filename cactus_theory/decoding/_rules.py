"""Which rule judges which drafted token of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.schedule import Schedule, Spec
from cactus_theory.policies import Policy
from cactus_theory.policies import policy as find_policy
from cactus_theory.verify._step import Decision, decide, decide_mixed

Choice = Int[Tensor, "batch K"]


class Rules:
    """One policy for everything, or a policy or schedule per row.

    Attributes
    ----------
    rules : the different policies; a choice is a number into them.
    """

    def __init__(self, policy: Spec | Schedule | Sequence[Spec | Schedule], texts: Texts) -> None:
        given = [policy] if isinstance(policy, str | Policy | Schedule) else list(_listed(policy))
        if len(given) not in (1, texts.batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({texts.batch}); got {len(given)}"
            )
        own = [item if isinstance(item, Schedule) else find_policy(item) for item in given]
        rules: list[Policy] = []
        for item in own:
            for rule in item.rules if isinstance(item, Schedule) else (item,):
                if rule not in rules:
                    rules.append(rule)
        self.rules = tuple(rules)
        self.own = own * (texts.batch // len(own))
        self.schedules = [item if isinstance(item, Schedule) else None for item in self.own]
        self.states: list[Any] = [
            None if schedule is None else schedule.begin(ids)
            for schedule, ids in zip(self.schedules, texts.ids, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        for name in ("own", "schedules", "states"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def choose(self, ids: Int[Tensor, "batch K"]) -> Choice | None:
        """Return the number of the rule for each drafted token, None if there is one rule."""
        if len(self.rules) == 1:
            return None
        return torch.stack([self._chosen(row, drafted) for row, drafted in enumerate(ids)])

    def _chosen(self, row: int, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        schedule, own = self.schedules[row], self.own[row]
        if schedule is None:
            return torch.full_like(drafted, self.rules.index(own))  # type: ignore[arg-type]
        numbers = [self.rules.index(rule) for rule in schedule.rules]
        return drafted.new_tensor(numbers)[schedule.choose(self.states[row], drafted)]

    def decide(
        self,
        choice: Choice | None,
        q: Float[Tensor, "batch K vocab"],
        p: Float[Tensor, "batch K vocab"] | None,
        ids: Int[Tensor, "batch K"],
        accept: Float[Tensor, "batch K"],
        drafted: Sequence[int],
    ) -> Decision:
        """Return φ of every drafted token and recovery rows on demand."""
        if choice is None:
            return decide(self.rules[0], q, p, ids, accept, drafted)
        return decide_mixed(self.rules, choice, q, p, ids)

    def advance(self, row: int, new_ids: Sequence[int]) -> None:
        """Let the schedule of a row take notice of its new tokens."""
        schedule = self.schedules[row]
        if schedule is not None:
            self.states[row] = schedule.advance(self.states[row], new_ids)


def _listed(policy: Any) -> Sequence[Any]:
    if isinstance(policy, Sequence):
        return policy
    raise TypeError(f"policy: must be a spec, a Policy or a Schedule; got {policy!r}")
