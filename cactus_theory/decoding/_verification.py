"""Which policy judges which drafted token of a batch, and copies of the rows it judged."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.copies import copied, is_own
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.result import VerifiedRows
from cactus_theory.decoding.schedule import OnePolicy, Schedule
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import PathState
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verified


class Rule:
    """A policy or a schedule along one text, with its state; foreign schedules see copies."""

    def __init__(self, policy: Policy | Schedule, prompt: Sequence[int]) -> None:
        self.schedule = policy if isinstance(policy, Schedule) else OnePolicy(policy)
        self.policies, kind = self.schedule.policies, type(self.schedule)
        self.own = is_own(kind)
        self.observes = kind.observe is not Schedule.observe
        self.state = self.schedule.begin(list(prompt))

    def observe(self, rows: VerifiedRows) -> None:
        """Show the schedule the rows that were verified, if it observes them."""
        if self.observes:
            self.state = self.schedule.observe(self.state, rows if self.own else copied(rows))

    def advance(self, new_ids: Sequence[int]) -> None:
        self.state = self.schedule.advance(self.state, list(new_ids))


def policies_of(followed: Sequence[Rule]) -> tuple[Policy, ...]:
    policies: list[Policy] = []
    for own in followed:
        policies += [policy for policy in own.policies if policy not in policies]
    return tuple(policies)


def assigned(
    followed: Sequence[Rule],
    policies: tuple[Policy, ...],
    q: Float[Tensor, "batch K1 vocab"],
    draft: Draft,
    verifier: Verifier,
) -> Assignment:
    if len(policies) == 1:
        return Assignment(policies)
    chosen, ratios, known = [], draft.token_ids.double() * math.nan, False
    for row, own in enumerate(followed):
        numbers = draft.token_ids.new_tensor([policies.index(policy) for policy in own.policies])
        given = q[row : row + 1], draft.of_text(row), verifier
        choice, alive = own.schedule.choose_by_nodes(own.state, *given)
        chosen.append(numbers[choice])
        if alive is not None:
            ratios[row], known = alive, True
    return Assignment(policies, torch.stack(chosen), ratios if known else None)


class RowPolicies:
    """The policy or schedule of each text: one for all, or one a row; ``distinct`` lists them."""

    def __init__(self, policies: Sequence[Policy | Schedule], texts: Texts) -> None:
        if len(policies) not in (1, texts.batch):
            raise ValueError(
                f"policy: must be one or one per row of input_ids ({texts.batch}); "
                f"got {len(policies)}"
            )
        of_row = list(policies) * (texts.batch // len(policies))
        self.followed = [Rule(*pair) for pair in zip(of_row, texts.ids, strict=True)]
        self.distinct = policies_of(self.followed)

    @property
    def observing(self) -> bool:
        return any(own.observes for own in self.followed)

    def keep(self, rows: Sequence[int]) -> None:
        self.followed = [self.followed[row] for row in rows]


def stacked(rounds: Sequence[VerifiedRows], vocab: int, verifier: Verifier) -> VerifiedRows:
    """Return the verified rows of all rounds as float64 rows that sum to 1."""
    if not rounds:
        nothing = torch.empty(0, vocab, dtype=torch.float64, device="cpu")
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return VerifiedRows(nothing, nothing.clone(), ids, ids.bool(), (), verifier)
    paths = [part.path for part in rounds if part.path is not None]
    alive = [path.alive for path in paths]
    raised = [path.alive * math.nan if path.raised is None else path.raised for path in paths]
    return VerifiedRows(
        check.normalised(torch.cat([part.target_probs for part in rounds])),
        check.normalised(torch.cat([part.draft_probs for part in rounds])),
        torch.cat([part.draft_token_ids for part in rounds]),
        torch.cat([part.accepted for part in rounds]),
        sum((part.policies for part in rounds), ()),
        verifier,
        PathState(torch.cat(alive), torch.cat(raised)) if paths else None,
    )


def rows_at(row: int, nodes: Any, verified: Verified) -> tuple[Tensor, Tensor]:
    """Return the target and draft rows of one text at charged nodes."""
    one_hot = verified.draft.probs is None and verified.draft.sampled is None
    places = judged_at(row, nodes, verified) if one_hot else nodes
    return verified.draft.rows(row, nodes, places, verified.target_probs)


def judged_at(row: int, nodes: Any, verified: Verified) -> Any:
    """Return the places of the drafted tokens judged at charged nodes of a row.

    Those are the accepted ones, and after them the first one that follows the node; ValueError
    for a charged node that no token was drafted after.
    """
    draft, verdict = verified.draft, verified.verdict
    if draft.parents is None or verdict.charged is None:  # as in a chain
        return nodes
    accepted, path = int(verdict.num_accepted[row]), verdict.path
    taken = range(accepted) if path is None else path[row, :accepted].tolist()
    after = {draft.node(row, place): place for place in reversed(range(draft.lengths[row]))}
    after |= {draft.node(row, place): place for place in taken}
    if missing := [node for node in nodes if node not in after]:
        raise ValueError(f"charged: tokens must follow each node; got none after {missing[0]}")
    return [after[node] for node in nodes]


def verified_rows(row: int, nodes: Any, verified: Verified, verifier: Verifier) -> VerifiedRows:
    """Return copies of all that was verified of one text at charged nodes."""
    ids = verified.draft.token_ids[row, judged_at(row, nodes, verified)].clone()
    accepted = torch.arange(len(ids), device=ids.device) < verified.verdict.num_accepted[row]
    choice, policies = verified.assigned.choice, verified.assigned.policies
    numbers = [0] * len(ids) if choice is None else choice[row, nodes].tolist()
    judged = tuple(policies[number] for number in numbers)
    q, p = rows_at(row, nodes, verified)
    path = path_to(row, nodes, verified)
    return VerifiedRows(q.clone(), p.clone(), ids, accepted, judged, verifier, path)


def path_to(row: int, nodes: Any, verified: Verified) -> PathState | None:
    """Return the path to the charged rows of one text, None where verified token by token."""
    verdict = verified.verdict
    if verdict.alive is None:
        return None
    # measured later, when a step may have written the next round there
    alive = verdict.alive[row, nodes].clone()
    if (ratios := verified.assigned.alive) is not None:
        chosen_by = ratios[row, nodes].to(alive.device)
        alive = torch.where(chosen_by.isnan(), alive, chosen_by)
    raised = None if verdict.raised is None else verdict.raised[row, nodes].clone()
    return PathState(alive, raised)
