"""Which policy judges which drafted token of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._meter import rows_of
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule
from cactus_theory.policies import Policy
from cactus_theory.policies._foreign_code import copied, is_own
from cactus_theory.verify.contract import Assignment, Draft


class Rules:
    """One policy for everything, or a policy or schedule per row.

    Attributes
    ----------
    rules : the different policies; a choice is an index into them.
    """

    def __init__(self, policies: Sequence[Policy | Schedule], texts: Texts) -> None:
        if len(policies) not in (1, texts.batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({texts.batch}); "
                f"got {len(policies)}"
            )
        rules: list[Policy] = []
        for item in policies:
            for rule in item.rules if isinstance(item, Schedule) else (item,):
                if rule not in rules:
                    rules.append(rule)
        self.rules = tuple(rules)
        self.own = list(policies) * (texts.batch // len(policies))
        self.schedules = [item if isinstance(item, Schedule) else None for item in self.own]
        self.states: list[Any] = [
            None if schedule is None else schedule.begin(list(ids))
            for schedule, ids in zip(self.schedules, texts.ids, strict=True)
        ]

    @property
    def observing(self) -> bool:
        """Return whether any schedule observes verified rows."""
        return any(own is not None and _overrides(own, "observe") for own in self.schedules)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for name in ("own", "schedules", "states"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def assign(self, q: Float[Tensor, "batch K1 vocab"], draft: Draft) -> Assignment:
        """Return which policy judges which drafted token of this round."""
        if len(self.rules) == 1:
            return Assignment(self.rules)
        chosen = [self._chosen(row, q, draft) for row in range(len(draft.token_ids))]
        return Assignment(self.rules, torch.stack(chosen))

    def _chosen(self, row: int, q: Tensor, draft: Draft) -> Int[Tensor, "K"]:
        """Return a policy for each node of a row that tokens were drafted after."""
        schedule, own, drafted = self.schedules[row], self.own[row], draft.token_ids[row]
        if schedule is None:
            return torch.full_like(drafted, self.rules.index(own))  # type: ignore[arg-type]
        numbers = drafted.new_tensor([self.rules.index(rule) for rule in schedule.rules])
        if draft.parents is None:
            return numbers[self._asked(row, q, draft, slice(0, len(drafted)))]
        found = torch.zeros_like(drafted)
        for place in range(draft.lengths[row]):  # the last choice does not know its own token
            path = draft.path(row, place)
            found[draft.node(row, place)] = numbers[self._asked(row, q, draft, path)[-1]]
        return found

    def _asked(self, row: int, q: Tensor, draft: Draft, path: Any) -> Int[Tensor, "count"]:
        """Return what the schedule of a row chooses for the tokens of one drafted path."""
        schedule, drafted = self.schedules[row], draft.token_ids[row, path]
        assert schedule is not None
        if not _overrides(schedule, "choose_by_rows"):
            return schedule.choose(self.states[row], *_shown(schedule, drafted))
        nodes = path if draft.parents is None else [draft.node(row, place) for place in path]
        rows = rows_of(row, nodes, path, q, draft)
        return schedule.choose_by_rows(self.states[row], *_shown(schedule, drafted, *rows))

    def observe(self, row: int, rows: VerifiedRows) -> None:
        """Show the schedule of a row the rows that were verified, if it observes them."""
        schedule = self.schedules[row]
        if schedule is not None and _overrides(schedule, "observe"):
            self.states[row] = schedule.observe(self.states[row], *_shown(schedule, rows))

    def advance(self, row: int, new_ids: Sequence[int]) -> None:
        """Update the state of a row's schedule with its new tokens."""
        schedule = self.schedules[row]
        if schedule is not None:
            self.states[row] = schedule.advance(self.states[row], list(new_ids))


def _shown(schedule: Schedule, *values: Any) -> tuple[Any, ...]:
    """Return what a schedule is shown: copies, if its class is not the package's own."""
    return values if is_own(type(schedule)) else copied(values)


def _overrides(schedule: Schedule, method: str) -> bool:
    return getattr(type(schedule), method) is not getattr(Schedule, method)
