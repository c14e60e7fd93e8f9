"""A chain on a CPU: whole rows are read only where a decision needs them.

Flags are read on the host, which is free for tensors on a CPU. A token is kept without reading
its rows if its policy decides from the drafted entries, or if lossless sampling keeps it and the
policy keeps whatever lossless sampling keeps. Among the others, the policy is called for the
first undecided token of each row only.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory._arguments import ROW_SUM_TOLERANCE
from cactus_theory._scratch import scratch
from cactus_theory.optimum.decide import LEAST
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._base import keep_probability, one_hot
from cactus_theory.policies._residual import Residual
from cactus_theory.verify._host import OnHost, Place, Places
from cactus_theory.verify.contract import Assignment, Draft

REFUSED, KEPT, OPEN = 0, 1, 2


class ChainOnHost(OnHost):
    """One verification of a batch, row by row up to each row's first refusal."""

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch K"],
        draw: Float[Tensor, "batch"],
    ) -> None:
        super().__init__(assigned, q, draft.probs, draft, accept, draw)
        self.ceilings: dict[int, Tensor] = {}  # of entrywise policies, by number
        workable = self.p is not None and q.dtype == self.p.dtype and q.dtype in LEAST
        self.rows = (q.numpy(), self.p.numpy()) if workable else None  # type: ignore[union-attr]

    def run(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return accepted counts and the token that follows them."""
        status = self._status().tolist()
        waiting = range(len(self.drafted))
        passed: list[Place] = []
        refused: list[Place] = []
        while waiting:
            asked = []
            for row in waiting:
                place, drafted, own = self.accepted[row], self.drafted[row], status[row]
                while place < drafted and own[place] == KEPT:
                    place += 1
                self.accepted[row] = place
                if place == drafted:
                    passed.append((row, place))
                else:
                    (asked if own[place] == OPEN else refused).append((row, place))
            waiting = self._ask(asked) if asked else ()
        for number, places in self._asked(refused):
            policy = self.assigned.policies[number]
            assert isinstance(policy, Entrywise)
            entries = places.of(self.q_n), places.of(self.ceilings[number])
            self._replace(policy.residual_entries(*entries), places.of(self.q), places)
        for places in self._together(passed):
            self._draw(places.of(self.q), places)
        return torch.tensor(self.accepted), self.last

    def _status(self) -> Shaped[Tensor, "batch K"]:
        """Return what is known of each token without reading its rows."""
        policies, choice = self.assigned.policies, self.assigned.choice
        status = [self._status_under(number) for number in range(len(policies))]
        if choice is None:
            return status[0]
        return torch.stack([own.long() for own in status]).gather(0, choice[None])[0]

    def _status_under(self, number: int) -> Shaped[Tensor, "batch K"]:
        policy = self.assigned.policies[number]
        if isinstance(policy, Entrywise):
            self.ceilings[number] = ceiling = policy.ceiling(self.q_n, self.p_n)
            return self.accept < keep_probability(ceiling, self.p_n)
        # rows whose sums miss 1 move the lossless test by as much: leave those to the policy
        sure = 1 - 2 * ROW_SUM_TOLERANCE[self.q.dtype]
        return torch.where(policy.keeps_at_once(self.q_n * sure, self.p_n, self.accept), KEPT, OPEN)

    def _ask(self, asked: list[Place]) -> list[int]:
        """Let the policies decide each row's first undecided token; return the rows that go on."""
        going_on = []
        for number, own in self._by_policy(asked):
            policy = self.assigned.policies[number]
            if policy.decides_rows and self.rows is not None:
                going_on += [place[0] for place in own if self._keeps(policy, place)]
            else:
                for places in self._together(own):
                    going_on += self._ask_together(policy, places)
        return going_on

    def _keeps(self, policy: Policy, at: Place) -> bool:
        """Return whether the token at a place is kept; if not, draw the one that replaces it."""
        assert self.rows is not None
        q, p = (rows[at] for rows in self.rows)
        coin, q_n, p_n = (entries[at].item() for entries in (self.accept, self.q_n, self.p_n))
        kept, scale = policy.decide_row(q, p, coin * p_n / q_n if q_n > 0 else math.inf)
        if kept:
            self.accepted[at[0]] += 1
        else:
            place = Places([at])
            self._replace(Residual(scale=scale), place.of(self.q), place)
        return kept

    def _ask_together(self, policy: Policy, places: Places) -> list[int]:
        q, ids = places.of(self.q), places.of(self.ids)
        p = one_hot(ids, q) if self.p is None else places.of(self.p)
        decision = policy.decide(q, p, ids, places.of(self.accept))
        going_on, stopped = [], []
        for entry, kept in enumerate(decision.kept.tolist()):
            if kept:
                row = places.rows[entry]
                self.accepted[row] += 1
                going_on.append(row)
            else:
                stopped.append(entry)
        if not stopped or decision.residual is None:
            return going_on
        if len(stopped) == len(places):
            self._replace(decision.residual, q, places)
        else:
            index = torch.tensor(stopped)
            self._replace(decision.residual.at(index), q[index], places.some(stopped))
        return going_on

    def _replace(self, residual: Residual, q: Float[Tensor, "rows vocab"], places: Places) -> None:
        """Draw the tokens that replace refused ones."""
        p = None if self.p is None else places.of(self.p)
        out = scratch("chain.residual", tuple(q.shape), q.dtype)
        self._draw(residual.law(q, p, places.of(self.ids), out), places)

    def _asked(self, places: list[Place]) -> Iterator[tuple[int, Places]]:
        """Yield places with the number of their policy, few enough to be worked on together."""
        for number, own in self._by_policy(places):
            for together in self._together(own):
                yield number, together
