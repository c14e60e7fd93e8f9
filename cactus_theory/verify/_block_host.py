"""A block on a CPU: whole rows are read only where a decision needs them.

Two sweeps. Forward, the alive ratio is followed from token to token as far as any later coin
could still pass; bounds from the drafted entries (:meth:`Policy.reach`) spare most rows.
Backward, the last token that passes is found: P = 1 always does and a coin above P never, so
few residuals are summed. Rows of a batch are asked together.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.optimum.decide import LEAST
from cactus_theory.optimum.soft_row import residual_mass
from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._path import Node, Path
from cactus_theory.verify._ahead import as_assigned, looked_ahead
from cactus_theory.verify._chain_host import ENTRIES, Places
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import pick

Place = tuple[int, int]


class BlockOnHost:
    """One verification of a batch of paths."""

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch K"],
        draw: Float[Tensor, "batch"],
        bonus: Float[Tensor, "batch vocab"] | None = None,
    ) -> None:
        self.bonus = bonus
        self.assigned, self.q, self.ids = assigned, _workable(q), draft.token_ids
        self.p = None if draft.probs is None else _workable(draft.probs)
        if self.p is not None and any(policy.follows_rows for policy in assigned.policies):
            self.rows = self.q.numpy(), self.p.numpy()
        self.coins, self.draw = accept.tolist(), draw
        self.drafted, self.planned = draft.lengths, draft.planned
        self.ahead = looked_ahead(assigned, self.q, draft)
        self.low, self.high = (bound.tolist() for bound in self._bounds())
        self.alive = [[1.0] for _ in self.drafted]  # of each row, as far as it is known
        self.ratios: dict[Place, float] = {}  # of the nodes that were just asked about
        # (P h − p)₊ at nodes whose rows were read: rows, or s of (s q − p)₊
        self.residuals: dict[Place, Tensor | float] = {}
        self.accepted = [0] * len(self.drafted)
        self.last = self.ids.new_empty(len(self.drafted))
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def run(
        self,
    ) -> tuple[
        Int[Tensor, "batch"],
        Int[Tensor, "batch"],
        None,
        None,
        Float[Tensor, "batch K"],
        Float[Tensor, "batch K"] | None,
    ]:
        """Return the fields of a verdict: counts, last tokens, …, alive ratios, raised h_n."""
        waiting = range(len(self.drafted))
        while waiting:
            asked = [row for row in waiting if self._advance(row)]
            self._follow([(row, len(self.alive[row]) - 1) for row in asked])
            for row in asked:  # followed at a node whose token the path may or may not pass
                place = len(self.alive[row]) - 1
                self.alive[row].append(min(1.0, self.ratios[row, place]))
            waiting = asked
        self._end()
        width = self.ids.shape[1]
        known = [(own + [0.0] * width)[:width] for own in self.alive]
        alive = torch.tensor(known, dtype=torch.float64)
        raised = as_assigned(self.ahead, self.assigned)
        return torch.tensor(self.accepted), self.last, None, None, alive, raised

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Return bounds (B, K) on h_n/p_n of the drafted tokens."""
        at = self.ids[..., None]
        q_n = self.q[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        p_n = (
            torch.ones_like(q_n)
            if self.p is None
            else self.p[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        )
        self.q_n, self.p_n = q_n.tolist(), p_n.tolist()
        bounds = [
            policy.reach(q_n, p_n) if own is None else (own, own)
            for policy, own in zip(self.assigned.policies, self.ahead, strict=True)
        ]
        choice = self.assigned.choice
        if choice is None:
            return bounds[0]
        low, high = (
            torch.stack(own).gather(0, choice[None])[0] for own in zip(*bounds, strict=True)
        )
        return low, high

    def _advance(self, row: int) -> bool:
        """Follow a path while entries tell its alive ratio; return whether rows are needed.

        A ratio of 0 stays 0: such a path is not followed any further.
        """
        alive, low, high = self.alive[row], self.low[row], self.high[row]
        while alive[-1] and (place := len(alive) - 1) < self.drafted[row]:
            least, most = alive[-1] * low[place], alive[-1] * high[place]
            if least >= 1 or least == most:
                alive.append(min(1.0, least))
            else:
                return self._may_pass(row, place)
        return False

    def _may_pass(self, row: int, place: int) -> bool:
        """Return whether any coin from this drafted token on could pass."""
        most = self.alive[row][-1]
        for later in range(place, self.drafted[row]):
            most = min(1.0, most * self.high[row][later])
            if self.coins[row][later] < most:
                return True
        return False

    def _follow(self, asked: Sequence[Place]) -> None:
        """Ask the policies about nodes; their ratios and residuals are remembered."""
        self.ratios = {}
        for number, own in self._by_policy(asked):
            policy = self.assigned.policies[number]
            if policy.follows_rows and self.p is not None:
                for place in own:
                    self._follow_row(policy, place)
                continue
            if self.ahead[number] is not None:
                for place in own:
                    self._follow_ahead(place)
                continue
            for first in range(0, len(own), self.at_once):
                self._follow_together(policy, Places(own[first : first + self.at_once]))

    def _follow_row(self, policy: Policy, place: Place) -> None:
        row, own = place
        node = Node(
            self.rows[0][place],
            self.rows[1][place],
            self.q_n[row][own],
            self.p_n[row][own],
            self.alive[row][own],
            self.planned[row] - 1 - own,
        )
        self.ratios[place], self.residuals[place] = policy.follow_row(node)

    def _follow_ahead(self, place: Place) -> None:
        """Raise a certain token to h_n, its bounds, and scale the rest of q."""
        row, own = place
        alive, rest = self.alive[row][own], 1 - self.q_n[row][own]
        self.ratios[place] = alive * self.low[row][own]
        self.residuals[place] = alive * (1 - self.low[row][own]) / rest if rest > 0 else 0.0

    def _follow_together(self, policy: Policy, places: Places) -> None:
        q, ids = places.of(self.q), places.of(self.ids)
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
        left = [self.planned[row] - 1 - place for row, place in places.places]
        return Path(torch.tensor(alive, dtype=torch.float64), torch.tensor(left))

    def _end(self) -> None:
        """Find each row's last token that passes, and draw the token after it."""
        ends = {row: len(alive) - 1 for row, alive in enumerate(self.alive)}
        while ends:
            going_on: dict[int, int] = {}
            passed, asked = [], []
            for row, place in ends.items():
                while place and self.coins[row][place - 1] >= self.alive[row][place]:
                    place -= 1
                self.accepted[row] = place
                (passed if place == self.drafted[row] else asked).append((row, place))
            self._follow([place for place in asked if place not in self.residuals])
            for first in range(0, len(passed), self.at_once):
                places = Places(passed[first : first + self.at_once])
                rows = places.of(self.q) if self.bonus is None else self.bonus[places.rows]
                self._draw(rows, places)
            for first in range(0, len(asked), self.at_once):
                for row, place in self._settle(Places(asked[first : first + self.at_once])):
                    going_on[row] = place - 1
            ends = going_on

    def _settle(self, places: Places) -> list[Place]:
        """Draw after the nodes whose coin passes; return the others."""
        masses = self._masses(places)
        passed, failed = [], []
        for entry, (row, place) in enumerate(places.places):
            alive, mass = self.alive[row][place], masses[entry]
            value = 1.0 if alive == 1 else mass / (mass + (1 - alive))
            ends = not place or self.coins[row][place - 1] < value
            (passed if ends else failed).append(entry)
        if passed:
            own = places.some(passed) if failed else places
            rows = self._residual(own)
            for entry, most in enumerate(rows.amax(-1).tolist()):
                if most <= 0:  # rounding reaches it: then from q
                    rows[entry] = self.q[own.places[entry]]
            self._draw(rows, own)
        return [places.places[entry] for entry in failed]

    def _masses(self, places: Places) -> list[float]:
        """Return Σ (P h − p)₊ of nodes; not asked of those that pass at any coin."""
        found = []
        for row, place in places.places:
            residual = self.residuals[row, place]
            if self.alive[row][place] == 1 and not isinstance(residual, Tensor):
                found.append(math.inf if residual > 0 else 0.0)
            elif isinstance(residual, Tensor) or self.p is None:
                mass = self._residual(Places([(row, place)])).sum(dtype=torch.float64)
                found.append(float(mass))
            else:
                q, p = self.q[row, place].numpy(), self.p[row, place].numpy()
                found.append(residual_mass(q, p, residual))
        return found

    def _residual(self, places: Places) -> Float[Tensor, "rows vocab"]:
        """Return (P h − p)₊ at nodes, in memory that the next call reuses."""
        q, ids = places.of(self.q), places.of(self.ids)
        out = scratch("block.residual", tuple(q.shape), q.dtype)
        for entry, place in enumerate(places.places):
            residual, own = self.residuals[place], out[entry]
            if isinstance(residual, Tensor):
                own.copy_(residual)
                continue
            torch.mul(q[entry], residual, out=own)
            if self.p is None:
                own[ids[entry]] -= 1.0
            else:
                own.sub_(self.p[place])
        return out.clamp_(min=0.0)

    def _draw(self, rows: Float[Tensor, "rows vocab"], places: Places) -> None:
        if len(self.drafted) == 1:
            self.last = pick(rows, self.draw)
        elif len(places) == 1:
            (row,) = places.rows
            self.last[row : row + 1] = pick(rows, self.draw[row : row + 1])
        else:
            index = places.index[0]
            self.last[index] = pick(rows, self.draw[index])

    def _by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, list[Place]]]:
        """Yield the places of each policy with its number."""
        choice = self.assigned.choice
        for number in range(len(self.assigned.policies)):
            if choice is None:
                yield number, list(places)
            else:
                yield number, [place for place in places if int(choice[place]) == number]


def _workable(rows: Float[Tensor, "batch K vocab"]) -> Float[Tensor, "batch K vocab"]:
    """Return rows that passes in numpy can read: float32 for those of half precision."""
    return rows if rows.dtype in LEAST else rows.float()
