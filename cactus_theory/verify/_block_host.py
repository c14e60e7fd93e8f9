"""A block on a CPU: whole rows are read only where a decision needs them.

Two sweeps. Forward, the alive ratio is followed from token to token as far as any later coin
could still pass; bounds from the drafted entries (:meth:`Policy.ratio_bounds`) spare most rows.
Backward, the last token that passes is found: P = 1 always does and a coin above P never, so
few residuals are summed. Rows of a batch are asked together.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.scratch import scratch
from cactus_theory.optimum.soft import PRECISIONS
from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._records import Node, Path
from cactus_theory.verify._host import OnHost, Place, Places, residual
from cactus_theory.verify.draft import Assignment, Draft, Verdict
from cactus_theory.verify.draw import NO_TOKEN


class BlockOnHost(OnHost):
    """One verification of a batch of paths."""

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        draft: Draft,
        coins: list[list[float]],
        draws: list[float],
        bonus: Float[Tensor, "batch vocab"] | None = None,
    ) -> None:
        rows = None if p is None else workable(p)
        super().__init__(assigned, workable(q), rows, draft, draws)
        self.bonus, self.coins, self.planned = bonus, coins, draft.planned
        if self.p is not None:
            self.rows = self.q.numpy(), self.p.numpy()
            if any(policy.answers_rows for policy in assigned.policies):
                self.entries = self.q_n.tolist(), self.p_n.tolist()
        self.raised = raised_entries(assigned, self.q, p, self._lawful_part(draft))
        # bounds on h_n/p_n of the drafted tokens
        self.low, self.high = (bound.tolist() for bound in self._bounds())
        self.alive = [[1.0] for _ in self.lengths]  # of each row, as far as it is known
        self.ratios: dict[Place, float] = {}  # P h_n/p_n at the nodes that were followed last
        # (P h − p)₊ at nodes where a path may end, once known: rows, or s of (s q − p)₊
        self.residuals: dict[Place, Tensor | float] = {}

    def run(self) -> Verdict:
        self.judge()
        width = self.ids.shape[1]
        padded = [(ratios + [0.0] * width)[:width] for ratios in self.alive]
        alive = torch.tensor(padded, dtype=torch.float64)
        raised, charges = entries_as_assigned(self.raised, self.assigned), self.bonus is not None
        return Verdict(self.ids, *self._accepted_and_last(), None, None, alive, raised, charges)

    def judge(self) -> None:
        """Find how many tokens of each path are accepted, and the token after them."""
        waiting = range(len(self.lengths))
        while waiting:
            unread = [row for row in waiting if self._advance(row)]
            self._follow([(row, len(self.alive[row]) - 1) for row in unread])
            for row in unread:  # followed at a node whose token the path may or may not pass
                place = len(self.alive[row]) - 1
                self.alive[row].append(min(1.0, self.ratios[row, place]))
            waiting = unread
        self._end()
        for row, place in self.cuts.items():  # a path of ratio 0 ends whatever follows
            if self.alive[row][-1]:
                self.accepted[row], self.last[row] = place, NO_TOKEN

    def _lawful_part(self, draft: Draft) -> Draft:
        """Return the draft as far as its rows have laws."""
        return replace(draft, counts=self.lengths) if self.cuts else draft

    def _bounds(self) -> tuple[Tensor, Tensor]:
        bounds = [
            policy.ratio_bounds(self.q_n, self.p_n) if raised is None else (raised, raised)
            for policy, raised in zip(self.assigned.policies, self.raised, strict=True)
        ]
        choice = self._choice()
        if choice is None:
            return bounds[0]
        low, high = (
            torch.stack(part).gather(0, choice[None])[0] for part in zip(*bounds, strict=True)
        )
        return low, high

    def _choice(self) -> Int[Tensor, "batch K"] | None:
        """Return which policy judges each drafted token."""
        return self.assigned.choice

    def _advance(self, row: int) -> bool:
        """Follow a path while entries tell its alive ratio; return whether rows are needed.

        A ratio of 0 stays 0: such a path is not followed any further.
        """
        alive, low, high = self.alive[row], self.low[row], self.high[row]
        while alive[-1] and (place := len(alive) - 1) < self.lengths[row]:
            least, most = alive[-1] * low[place], alive[-1] * high[place]
            if least >= 1 or least == most:
                alive.append(min(1.0, least))
            else:
                return row in self.cuts or self._may_pass(row, place)
        return False

    def _may_pass(self, row: int, place: int) -> bool:
        """Return whether any coin from this drafted token on could pass."""
        most = self.alive[row][-1]
        for later in range(place, self.lengths[row]):
            most = min(1.0, most * self.high[row][later])
            if self.coins[row][later] < most:
                return True
        return False

    def _follow(self, places: Sequence[Place], ends: bool = False) -> None:
        """Ask the policies about nodes, where paths end or go on; keep ratios and residuals."""
        self.ratios = {}
        for number, policy_places in self._by_policy(places):
            policy = self.assigned.policies[number]
            if policy.answers_rows and self.p is not None:
                for place in policy_places:
                    self._follow_row(policy, place, ends)
            elif self.raised[number] is not None:
                for place in policy_places:
                    self._follow_raised(place)
            else:
                for chunk in self._chunks(policy_places):
                    self._follow_chunk(policy, chunk)

    def _follow_row(self, policy: Policy, place: Place, ends: bool) -> None:
        self.ratios[place], scale, *_ = policy.follow_row(self._node(place, ends))
        if scale is not None:
            self.residuals[place] = scale

    def _node(self, place: Place, *rest: Any) -> Node:
        (row, index), at = place, self._row_index(place)
        q_n, p_n = self.entries[0][row][index], self.entries[1][row][index]
        alive, left = self.alive[row][index], self._tokens_left(place)
        return Node(self.rows[0][at], self.rows[1][at], q_n, p_n, alive, left, *rest)

    def _tokens_left(self, place: Place) -> int:
        """Return how many drafted tokens are planned to follow the one at a place."""
        return self.planned[place[0]] - 1 - place[1]

    def _follow_raised(self, place: Place) -> None:
        """Scale what q leaves beside a certain token, which is raised to h_n, its bounds."""
        row, index = place
        rest = 1 - float(self.q_n[place])
        mass = self.alive[row][index] * (1 - self.low[row][index])
        self.residuals[place] = mass / rest if rest > 0 else 0.0

    def _follow_chunk(self, policy: Policy, places: Places) -> None:
        q, ids = places.of(self.q), Places(places.places).of(self.ids)
        p = one_hot(ids, q) if self.p is None else places.of(self.p)
        step = policy.follow(q, p, ids, self._path(places))
        ratios, residual = step.ratio.tolist(), step.residual
        for entry, place in enumerate(places.places):
            self.ratios[place] = ratios[entry]
            if residual.rows is None:
                self.residuals[place] = residual.scale_at(entry)
            else:
                self.residuals[place] = residual.rows[entry]

    def _path(self, places: Places) -> Path:
        alive = [self.alive[row][place] for row, place in places.places]
        left = torch.tensor([self._tokens_left(place) for place in places.places])
        return Path(torch.tensor(alive, dtype=torch.float64), left)

    def _end(self) -> None:
        """Find each row's last token that passes, and draw the token after it."""
        ends = {row: len(alive) - 1 for row, alive in enumerate(self.alive)}
        while ends:
            passed, ending = [], []
            for row, place in ends.items():
                while place and self.coins[row][place - 1] >= self.alive[row][place]:
                    place -= 1
                self.accepted[row] = place
                (passed if place == self.lengths[row] else ending).append((row, place))
            failed = self._coins_too_high(
                [place for place in ending if place not in self.residuals]
            )
            ending = [place for place in ending if place not in failed]
            self._follow([place for place in ending if place not in self.residuals], ends=True)
            self._draw_each([row for row, _ in passed], [*map(self._bonus_row, passed)])
            for places in self._chunks(ending):
                failed |= set(self._settle(places))
            ends = {row: place - 1 for row, place in failed}

    def _coins_too_high(self, places: Sequence[Place]) -> set[Place]:
        """Return nodes that need not be solved: their coins fail even against (P q − p)₊.

        Of policies that answer rows.
        """
        if self.p is None:
            return set()
        policies = self.assigned.policies
        return {
            place
            for number, policy_places in self._by_policy(places)
            if policies[number].answers_rows
            for place in policy_places
            if not self._may_end(*place)
        }

    def _may_end(self, row: int, place: int) -> bool:
        """Return whether a path could end at a node if its scale were P, the most it can be."""
        alive = self.alive[row][place]
        if not place or alive == 1 or self.low[row][place] == self.high[row][place]:
            return True
        rows = self._residual(self._places([(row, place)]), alive)
        return self._passes(row, place, float(rows.sum()))

    def _passes(self, row: int, place: int, mass: float) -> bool:
        """Return whether a path ends at a node with Σ (P h − p)₊ = ``mass``."""
        missing = 1 - self.alive[row][place]
        return not place or not missing or self.coins[row][place - 1] < mass / (mass + missing)

    def _bonus_row(self, place: Place) -> Float[Tensor, "vocab"]:
        return self.q[self._row_index(place)] if self.bonus is None else self.bonus[place[0]]

    def _settle(self, places: Places) -> list[Place]:
        """Draw after the nodes whose coin passes; return the others."""
        rows = self._residual(places)
        passed, laws, failed = [], [], []
        for law, mass, place in zip(rows, rows.sum(-1).tolist(), places.places, strict=True):
            if self._passes(*place, mass):  # rounding reaches 0: then from q
                passed.append(place[0])
                laws.append(self.q[self._row_index(place)] if mass <= 0 else law)
            else:
                failed.append(place)
        self._draw_each(passed, laws)
        return failed

    def _residual(self, places: Places, scale: float | None = None) -> Float[Tensor, "rows vocab"]:
        """Return (P h − p)₊ at nodes, or (``scale`` q − p)₊, in memory that is reused."""
        out = scratch("block.residual", (len(places), self.q.shape[-1]), self.q.dtype)
        for row, place in zip(out, places.places, strict=True):
            stored = self.residuals[place] if scale is None else scale
            if isinstance(stored, Tensor):
                row.copy_(stored).clamp_(min=0.0)
            elif self.p is not None:
                q, p = (rows[self._row_index(place)] for rows in self.rows)
                residual(q, p, stored, row.numpy())
            else:
                torch.mul(self.q[place], stored, out=row)
                row[self.ids[place]] -= 1.0
                row.clamp_(min=0.0)
        return out


def raised_entries(
    assigned: Assignment, q: Float[Tensor, "texts nodes vocab"], p: Tensor | None, draft: Draft
) -> list[Tensor | None]:
    """Return h_n (B, K) of a certain draft under each policy; None where it does not look ahead."""
    if p is not None:
        return [None] * len(assigned.policies)
    ids = draft.token_ids
    q_n = q[:, : ids.shape[1]].gather(-1, ids[..., None])[..., 0].double()
    counts = torch.as_tensor(draft.counts, device=ids.device)
    return [policy.certain_path(q_n, counts) for policy in assigned.policies]


def entries_as_assigned(raised: list[Tensor | None], assigned: Assignment) -> Tensor | None:
    """Return (B, K) h_n under the policy of each token, NaN where it does not look ahead."""
    if assigned.choice is None:
        return raised[0]
    first = next((entries for entries in raised if entries is not None), None)
    if first is None:
        return None
    mixed = torch.full_like(first, math.nan)
    for number, entries in enumerate(raised):
        if entries is not None:
            mixed = torch.where(assigned.choice == number, entries, mixed)
    return mixed


def workable(rows: Float[Tensor, "batch K vocab"]) -> Float[Tensor, "batch K vocab"]:
    """Return rows that passes in numpy can read: float32 for those of half precision."""
    return rows if rows.dtype in PRECISIONS else rows.float()
