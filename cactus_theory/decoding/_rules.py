"""Which policy judges which drafted token of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._meter import verified
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule, Spec, check_followed, find_rule
from cactus_theory.policies import Policy
from cactus_theory.policies._lent import copied, is_own
from cactus_theory.verify.contract import Assignment, Draft, Verifier


class Rules:
    """One policy for everything, or a policy or schedule per row.

    Attributes
    ----------
    rules : the different policies; a choice is an index into them.
    """

    def __init__(self, policy: Spec | Schedule | Sequence[Spec | Schedule], texts: Texts) -> None:
        given = [policy] if isinstance(policy, str | Policy | Schedule) else list(_listed(policy))
        if len(given) not in (1, texts.batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({texts.batch}); got {len(given)}"
            )
        own = [find_rule(item) for item in given]
        rules: list[Policy] = []
        for item in own:
            for rule in item.rules if isinstance(item, Schedule) else (item,):
                if rule not in rules:
                    rules.append(rule)
        self.rules = tuple(rules)
        self.own = own * (texts.batch // len(own))
        self.schedules = [item if isinstance(item, Schedule) else None for item in self.own]
        self.states: list[Any] = [
            None if schedule is None else schedule.begin(list(ids))
            for schedule, ids in zip(self.schedules, texts.ids, strict=True)
        ]

    def check(self, verifier: Verifier) -> None:
        """Raise ValueError for a policy or a schedule that the verifier cannot follow."""
        for own in self.own:
            check_followed(own, verifier)

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
        schedule, own, drafted = self.schedules[row], self.own[row], draft.token_ids[row]
        if schedule is None:
            return torch.full_like(drafted, self.rules.index(own))  # type: ignore[arg-type]
        if _overrides(schedule, "choose_by_rows"):
            rows = verified(row, slice(0, len(drafted)), q, draft)
            shown = _shown(schedule, drafted, *rows)
            choice = schedule.choose_by_rows(self.states[row], *shown)
        else:
            choice = schedule.choose(self.states[row], *_shown(schedule, drafted))
        return drafted.new_tensor([self.rules.index(rule) for rule in schedule.rules])[choice]

    def observe(self, row: int, charged: Any, accepted: int, q: Tensor, draft: Draft) -> None:
        """Show the schedule of a row the rows that were verified, if it observes them."""
        schedule = self.schedules[row]
        if schedule is None or not _overrides(schedule, "observe"):
            return
        ids = draft.token_ids[row, charged]
        kept = torch.arange(len(ids), device=ids.device) < accepted
        rows = VerifiedRows(*verified(row, charged, q, draft), ids.clone(), kept)
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


def _listed(policy: Any) -> Sequence[Any]:
    if isinstance(policy, Sequence):
        return policy
    raise TypeError(f"policy: must be a spec, a Policy or a Schedule; got {policy!r}")
