"""A chain on a CPU: whole rows are read only where a decision needs them.

Flags are read on the host, which is free for tensors on a CPU. A token is kept without reading
its rows if its policy decides from the drafted entries, or if lossless sampling keeps it and the
policy keeps whatever lossless sampling keeps. Among the others, the policy is called for the
first undecided token of each row only.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.base.arguments import ROW_SUM_TOLERANCE
from cactus_theory.base.scratch import scratch
from cactus_theory.optimum.soft import PRECISIONS
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._base import keep_probability, one_hot
from cactus_theory.policies._path import Residual
from cactus_theory.verify._host import OnHost, Place, Places, residual
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN


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
        super().__init__(assigned, q, draft.probs, draft, draw.tolist())
        self.accept = accept
        self.ceilings: dict[int, Tensor] = {}  # of entrywise policies, by number
        workable = self.p is not None and q.dtype == self.p.dtype and q.dtype in PRECISIONS
        self.rows = (q.numpy(), self.p.numpy()) if workable else None  # type: ignore[union-attr]
        if workable and any(policy.answers_rows for policy in assigned.policies):
            self.entries = [entries.tolist() for entries in (accept, self.q_n, self.p_n)]

    def run(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return accepted counts and the token that follows them."""
        kept = self._kept().tolist()
        waiting = range(len(self.drafted))
        passed: list[Place] = []
        refused: list[Place] = []
        while waiting:
            asked = []
            for row in waiting:
                place, drafted, own = self.accepted[row], self.drafted[row], kept[row]
                while place < drafted and own[place]:
                    place += 1
                self.accepted[row] = place
                if place == drafted:
                    passed.append((row, place))
                else:
                    (asked if self._open(row, place) else refused).append((row, place))
            waiting = self._ask(asked) if asked else ()
        for number, places in self._asked(refused):
            policy = self.assigned.policies[number]
            assert isinstance(policy, Entrywise)
            entries = places.of(self.q_n), places.of(self.ceilings[number])
            self._replace(policy.residual_entries(*entries), places)
        few = self._few(len(passed))
        laws = [self.q[place] for place in passed] if few else Places(passed).of(self.q)
        self._draw_each([row for row, _ in passed], laws)
        for row, place in self.lost.items():
            if self.accepted[row] == place:
                self.drawn[row] = NO_TOKEN
        return self._found()

    def _kept(self) -> Bool[Tensor, "batch K"]:
        """Return which tokens are kept without reading their rows."""
        policies, choice = self.assigned.policies, self.assigned.choice
        kept = [self._kept_under(number) for number in range(len(policies))]
        return kept[0] if choice is None else torch.stack(kept).gather(0, choice[None])[0]

    def _open(self, row: int, place: int) -> bool:
        """Return whether a token that is not kept so may be kept by its rows."""
        choice = self.assigned.choice
        number = 0 if choice is None else int(choice[row, place])
        return number not in self.ceilings

    def _kept_under(self, number: int) -> Bool[Tensor, "batch K"]:
        policy = self.assigned.policies[number]
        if isinstance(policy, Entrywise):
            self.ceilings[number] = ceiling = policy.ceiling(self.q_n, self.p_n)
            return self.accept < keep_probability(ceiling, self.p_n)
        # rows whose sums miss 1 move the lossless test by as much: leave those to the policy
        sure = 1 - 2 * ROW_SUM_TOLERANCE[self.q.dtype]
        return policy.keeps_at_once(self.q_n * sure, self.p_n, self.accept)

    def _ask(self, asked: list[Place]) -> list[int]:
        """Let the policies decide each row's first undecided token; return the rows that go on."""
        going_on = []
        for number, own in self._by_policy(asked):
            policy = self.assigned.policies[number]
            if policy.answers_rows and self.rows is not None:
                going_on += [place[0] for place in own if self._keeps(policy, place)]
            else:
                for places in self._together(own):
                    going_on += self._ask_together(policy, places)
        return going_on

    def _keeps(self, policy: Policy, at: Place) -> bool:
        """Return whether the token at a place is kept; if not, draw the one that replaces it."""
        assert self.rows is not None
        q, p = (rows[at] for rows in self.rows)
        row, own = at
        coin, q_n, p_n = (entries[row][own] for entries in self.entries)
        kept, scale = policy.decide_row(q, p, coin * p_n / q_n if q_n > 0 else math.inf)
        if kept:
            self.accepted[at[0]] += 1
        else:
            self._replace_row(scale, at)
        return kept

    def _ask_together(self, policy: Policy, places: Places) -> list[int]:
        q, ids = places.of(self.q), places.of(self.ids)
        p = one_hot(ids, q) if self.p is None else places.of(self.p)
        decision = policy.decide(q, p, ids, places.of(self.accept))
        going_on, stopped = [], []
        for entry, kept in enumerate(decision.kept.tolist()):
            if kept:
                row = places.places[entry][0]
                self.accepted[row] += 1
                going_on.append(row)
            else:
                stopped.append(entry)
        if not stopped or decision.residual is None:
            return going_on
        if len(stopped) == len(places):
            self._replace(decision.residual, places)
        else:
            own = Places([places.places[entry] for entry in stopped])
            self._replace(decision.residual.at(torch.tensor(stopped)), own)
        return going_on

    def _replace(self, residual: Residual, places: Places) -> None:
        """Draw the tokens that replace refused ones."""
        if self.rows is not None and residual.rows is None and self._few(len(places)):
            for entry, place in enumerate(places.places):
                self._replace_row(residual.scale_at(entry), place)
            return
        q, p = places.of(self.q), None if self.p is None else places.of(self.p)
        out = scratch("chain.residual", tuple(q.shape), q.dtype)
        laws = residual.law(q, p, places.of(self.ids), out)
        self._draw_each([row for row, _ in places.places], laws)

    def _replace_row(self, scale: float, at: Place) -> None:
        """Draw the token that replaces a refused one, from (``scale`` q − p)₊, or q if it is 0."""
        assert self.rows is not None
        q, p = (rows[at] for rows in self.rows)
        left = self._left.numpy()
        residual(q, p, scale, left)
        self._draw(at[0], self._left)
        if self.drawn[at[0]] == NO_TOKEN and left.max() <= 0:  # NaN is no rounding
            self._draw(at[0], self.q[at])

    @cached_property
    def _left(self) -> Float[Tensor, "vocab"]:
        return scratch("chain.residual", self.q.shape[-1:], self.q.dtype)

    def _asked(self, places: list[Place]) -> Iterator[tuple[int, Places]]:
        """Yield places with the number of their policy, few enough to be worked on together."""
        for number, own in self._by_policy(places):
            for together in self._together(own):
                yield number, together
