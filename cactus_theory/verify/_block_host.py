"""A block on a CPU: whole rows are read only where a decision needs them.

Two sweeps. Forward, the alive ratio is followed from token to token as far as any later coin
could still pass; bounds from the drafted entries (:meth:`Policy.reach`) spare most rows.
Backward, the last token that passes is found: P = 1 always does and a coin above P never, so
few residuals are summed. Rows of a batch are asked together.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory._scratch import scratch
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._path import Path
from cactus_theory.policies._residual import Residual
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
    ) -> None:
        self.assigned, self.q, self.p, self.ids = assigned, q, draft.probs, draft.token_ids
        self.coins, self.draw = accept.tolist(), draw
        self.drafted = draft.lengths
        self.low, self.high = (bound.tolist() for bound in self._bounds())
        self.alive = [[1.0] for _ in self.drafted]  # of each row, as far as it is known
        self.ratios: dict[Place, float] = {}  # of the nodes that were just asked about
        self.residuals: dict[Place, Residual] = {}  # at nodes whose rows were read
        self.accepted = [0] * len(self.drafted)
        self.last = self.ids.new_empty(len(self.drafted))
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def run(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"], Float[Tensor, "batch K"]]:
        """Return accepted counts, the token that follows them, and the alive ratio of rows."""
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
        return torch.tensor(self.accepted), self.last, torch.tensor(known, dtype=torch.float64)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Return bounds (B, K) on h_n/p_n of the drafted tokens."""
        at = self.ids[..., None]
        q_n = self.q[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        p_n = torch.ones_like(q_n) if self.p is None else self.p.gather(-1, at)[..., 0].double()
        bounds = [policy.reach(q_n, p_n) for policy in self.assigned.policies]
        choice = self.assigned.choice
        if choice is None:
            return bounds[0]
        low, high = (
            torch.stack(own).gather(0, choice[None])[0] for own in zip(*bounds, strict=True)
        )
        return low, high

    def _advance(self, row: int) -> bool:
        """Follow a path while entries tell its alive ratio; return whether rows are needed."""
        alive, low, high = self.alive[row], self.low[row], self.high[row]
        while (place := len(alive) - 1) < self.drafted[row]:
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
        for number, places in self._by_policy(asked):
            q, ids = places.of(self.q), places.of(self.ids)
            p = one_hot(ids, q) if self.p is None else places.of(self.p)
            alive = torch.tensor([self.alive[row][place] for row, place in places.places])
            left = torch.tensor([self.drafted[row] - 1 - place for row, place in places.places])
            step = self.assigned.policies[number].follow(q, p, ids, Path(alive.double(), left))
            for entry, (place, ratio) in enumerate(
                zip(places.places, step.ratio.tolist(), strict=False)
            ):
                self.ratios[place] = ratio
                if step.residual is not None:
                    self.residuals[place] = step.residual.at(torch.tensor([entry]))

    def _path(self, places: Places) -> Path:
        alive = [self.alive[row][place] for row, place in places.places]
        left = [self.drafted[row] - 1 - place for row, place in places.places]
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
                self._draw(places.of(self.q), places)
            for first in range(0, len(asked), self.at_once):
                for row, place in self._settle(Places(asked[first : first + self.at_once])):
                    going_on[row] = place - 1
            ends = going_on

    def _settle(self, places: Places) -> list[Place]:
        """Draw after the nodes whose coin passes; return the others."""
        rows = self._residual(places)
        totals = rows.sum(-1, dtype=torch.float64)
        if self.p is not None:  # rows of few digits may miss 1
            totals = totals / places.of(self.p).sum(-1, dtype=torch.float64)
        passed, failed = [], []
        for entry, ((row, place), total) in enumerate(
            zip(places.places, totals.tolist(), strict=False)
        ):
            alive = self.alive[row][place]
            value = 1.0 if alive == 1 else total / (total + (1 - alive))
            ends = not place or self.coins[row][place - 1] < value
            (passed if ends else failed).append(entry)
        if passed:
            own = places if not failed else places.some(passed)
            kept = rows if not failed else rows[torch.tensor(passed)]
            empty = kept.sum(-1, keepdim=True) <= 0  # rounding reaches it: then from q
            self._draw(torch.where(empty, own.of(self.q), kept), own)
        return [places.places[entry] for entry in failed]

    def _residual(self, places: Places) -> Float[Tensor, "rows vocab"]:
        """Return (P h − p)₊ at nodes, in memory that the next call reuses."""
        q, ids = places.of(self.q), places.of(self.ids)
        out = scratch("block.residual", tuple(q.shape), q.dtype)
        for entry, place in enumerate(places.places):
            residual, own = self.residuals[place], slice(entry, entry + 1)
            if residual.rows is not None:
                out[own].copy_(residual.rows)
                continue
            torch.mul(q[own], residual.scale_at(0), out=out[own])
            if self.p is None:
                out[entry, ids[entry]] -= 1.0
            else:
                out[own].sub_(self.p[place[0], place[1] : place[1] + 1])
        return out.clamp_(min=0.0)

    def _draw(self, rows: Float[Tensor, "rows vocab"], places: Places) -> None:
        index = torch.tensor(places.rows)
        self.last[index] = pick(rows, self.draw[index])

    def _by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, Places]]:
        """Yield places with the number of their policy, few enough to be worked on together."""
        choice = self.assigned.choice
        for number in range(len(self.assigned.policies)):
            own = list(places)
            if choice is not None:
                own = [place for place in places if int(choice[place]) == number]
            for first in range(0, len(own), self.at_once):
                yield number, Places(own[first : first + self.at_once])
