"""Which policy judges which drafted token of a batch, and copies of the rows it judged."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import Schedule
from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._foreign_code import copied, is_own
from cactus_theory.policies._records import Path
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verified


class RowPolicies:
    """One policy for everything, or a policy or schedule per row.

    ``distinct`` are the different policies; a choice is an index into them.
    """

    def __init__(self, policies: Sequence[Policy | Schedule], texts: Texts) -> None:
        if len(policies) not in (1, texts.batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({texts.batch}); "
                f"got {len(policies)}"
            )
        distinct: list[Policy] = []
        for item in policies:
            for policy in item.rules if isinstance(item, Schedule) else (item,):
                if policy not in distinct:
                    distinct.append(policy)
        self.distinct = tuple(distinct)
        self.of_row = list(policies) * (texts.batch // len(policies))
        self.schedules = [item if isinstance(item, Schedule) else None for item in self.of_row]
        self.states: list[Any] = [
            None if schedule is None else schedule.begin(list(ids))
            for schedule, ids in zip(self.schedules, texts.ids, strict=True)
        ]

    @property
    def observing(self) -> bool:
        """Return whether any schedule observes verified rows."""
        return any(item is not None and _overrides(item, "observe") for item in self.schedules)

    def keep(self, rows: Sequence[int]) -> None:
        for name in ("of_row", "schedules", "states"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def assign(self, q: Float[Tensor, "batch K1 vocab"], draft: Draft) -> Assignment:
        """Return which policy judges which drafted token of this round."""
        if len(self.distinct) == 1:
            return Assignment(self.distinct)
        chosen = [self._chosen(row, q, draft) for row in range(len(draft.token_ids))]
        return Assignment(self.distinct, torch.stack(chosen))

    def _chosen(self, row: int, q: Tensor, draft: Draft) -> Int[Tensor, "K"]:
        """Return a policy for each node of a row that tokens were drafted after."""
        schedule, policy, drafted = self.schedules[row], self.of_row[row], draft.token_ids[row]
        if schedule is None:
            return torch.full_like(drafted, self.distinct.index(policy))  # type: ignore[arg-type]
        numbers = drafted.new_tensor([self.distinct.index(policy) for policy in schedule.rules])
        if draft.parents is None:
            return numbers[self._scheduled(row, q, draft, slice(0, len(drafted)))]
        choice = torch.zeros_like(drafted)
        for place in range(draft.lengths[row]):  # the last choice does not know its own token
            path = draft.path(row, place)
            choice[draft.node(row, place)] = numbers[self._scheduled(row, q, draft, path)[-1]]
        return choice

    def _scheduled(self, row: int, q: Tensor, draft: Draft, path: Any) -> Int[Tensor, "count"]:
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
        schedule = self.schedules[row]
        if schedule is not None:
            self.states[row] = schedule.advance(self.states[row], list(new_ids))


def _shown(schedule: Schedule, *values: Any) -> tuple[Any, ...]:
    """Return what a schedule is shown: copies, if its class is not the package's own."""
    return values if is_own(type(schedule)) else copied(values)


def _overrides(schedule: Schedule, method: str) -> bool:
    return getattr(type(schedule), method) is not getattr(Schedule, method)


def stacked(rounds: Sequence[VerifiedRows], vocab: int) -> VerifiedRows:
    """Return the verified rows of all rounds as float64 rows that sum to 1."""
    if not rounds:
        nothing = torch.empty(0, vocab, dtype=torch.float64)
        ids = torch.empty(0, dtype=torch.int64)
        return VerifiedRows(nothing, nothing.clone(), ids, ids.bool())
    return VerifiedRows(
        check.normalised(torch.cat([part.target_probs for part in rounds])),
        check.normalised(torch.cat([part.draft_probs for part in rounds])),
        torch.cat([part.draft_token_ids for part in rounds]),
        torch.cat([part.accepted for part in rounds]),
        sum((part.policies for part in rounds), ()),
        rounds[0].verifier,
        _joined([part.path for part in rounds if part.path is not None]),
    )


def _joined(paths: Sequence[Path]) -> Path | None:
    if not paths:
        return None
    raised = [path.alive * math.nan if path.raised is None else path.raised for path in paths]
    parts = [path.alive for path in paths], [path.left for path in paths], raised
    return Path(*map(torch.cat, parts))


def rows_of(
    row: int, nodes: Any, places: Any, q: Tensor, draft: Draft
) -> tuple[Float[Tensor, "count vocab"], Float[Tensor, "count vocab"]]:
    """Return copies of the target and draft rows of one text at nodes.

    ``places`` are the drafted tokens that follow them, which a certain draft is certain of. Where
    the draft declares the laws of its nodes its row is their selection law.
    """
    target_rows = q[row, nodes].clone()
    if draft.sampled is not None:
        numbers = range(draft.lengths[row])[nodes] if isinstance(nodes, slice) else nodes
        return target_rows, draft.offers(row, numbers, target_rows)
    if draft.probs is None:
        return target_rows, one_hot(draft.token_ids[row, places], target_rows)
    return target_rows, draft.probs[row, nodes].clone()


def rows_at(row: int, nodes: Any, verified: Verified) -> tuple[Tensor, Tensor]:
    """Return the same of charged nodes."""
    declared = verified.draft.sampled is not None
    places = verified.judged(row, nodes) if verified.draft.probs is None and not declared else nodes
    q, p = rows_of(row, nodes, places, verified.target_probs, verified.draft)
    if declared and verified.verdict.raised is not None:
        raised = verified.raised(row)
        for number, node in enumerate(nodes):
            ids, values = raised[node]
            if ids:  # their shares of what h gives them
                p[number] = 0.0
                p[number, ids] = p.new_tensor(values) / math.fsum(values)
    return q, p


def verified_rows(row: int, nodes: Any, verified: Verified, verifier: Verifier) -> VerifiedRows:
    """Return copies of all that was verified of one text at charged nodes, no bonus among them."""
    ids = verified.draft.token_ids[row, verified.judged(row, nodes)].clone()
    kept = torch.arange(len(ids), device=ids.device) < verified.verdict.num_accepted[row]
    choice, policies = verified.assigned.choice, verified.assigned.policies
    numbers = [0] * len(ids) if choice is None else choice[row, nodes].tolist()
    judged = tuple(policies[number] for number in numbers)
    path = path_to(row, nodes, verified)
    return VerifiedRows(*rows_at(row, nodes, verified), ids, kept, judged, verifier, path)


def path_to(row: int, nodes: Any, verified: Verified) -> Path | None:
    """Return how charged rows of one text were reached, None where it does not matter."""
    verdict, draft = verified.verdict, verified.draft
    if verdict.alive is None:
        return None
    # measured later, when a step may have written the next round there
    alive, drafted = verdict.alive[row, nodes].clone(), draft.lengths[row]
    left = alive.new_tensor(draft.left(row), dtype=torch.int64)[:drafted][nodes]
    raised = None if verdict.raised is None else verdict.raised[row, nodes].clone()
    if raised is not None and draft.sampled is not None:
        mass = [math.fsum(values) or math.nan for _, values in verified.raised(row)]
        raised = alive.new_tensor(mass)[nodes]
    if isinstance(nodes, slice) and nodes.stop > drafted:  # a bonus: see ``Block.bonus``
        alive = torch.cat([alive[:drafted], alive.new_ones(1)])
        left = torch.cat([left, left.new_zeros(1)])
    return Path(alive, left, raised)
