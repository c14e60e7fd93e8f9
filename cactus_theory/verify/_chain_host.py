"""A chain on a CPU: whole rows are read only where a decision needs them.

Flags are read on the host, which costs nothing there. A token is kept at once where its
policy says so from the drafted entries, or where lossless sampling keeps it and the policy
never refuses that; of the others only the first undecided one of each row is asked about.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory._arguments import ROW_SUM_TOLERANCE
from cactus_theory._scratch import scratch
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._residual import Residual
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import pick

# whole rows are worked on so many entries at a time: few calls on short rows, and views
# instead of copies of long ones
ENTRIES = 2**15
REFUSED, KEPT, OPEN = 0, 1, 2
Place = tuple[int, int]


class ChainOnHost:
    """One verification of a batch, row by row up to each row's first refusal."""

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch K"],
        draw: Float[Tensor, "batch"],
    ) -> None:
        self.assigned, self.q, self.p, self.ids = assigned, q, draft.probs, draft.token_ids
        self.accept, self.draw = accept, draw
        at = self.ids[..., None]
        self.q_n = q[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        if self.p is None:
            self.p_n = torch.ones_like(self.q_n)
        else:
            self.p_n = self.p.gather(-1, at)[..., 0].double()
        self.drafted = draft.lengths
        self.accepted = [0] * len(self.drafted)
        self.last = torch.empty(len(self.drafted), dtype=torch.int64)
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def run(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return accepted counts and the token that follows them."""
        status = self._status().tolist()
        waiting: Iterable[int] = range(len(self.drafted))
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
            waiting = self._ask(asked)
        self._recover(refused)
        for places in _some(passed, self.at_once):
            self._draw(_rows(self.q, places), places)
        return torch.tensor(self.accepted), self.last

    def _status(self) -> Int[Tensor, "batch K"]:
        """Return what is known of each token without reading its rows."""
        policies, choice = self.assigned.policies, self.assigned.choice
        status = [self._status_under(policy) for policy in policies]
        return status[0] if choice is None else torch.stack(status).gather(0, choice[None])[0]

    def _status_under(self, policy: Policy) -> Int[Tensor, "batch K"]:
        if isinstance(policy, Entrywise):
            return (self.accept < policy.keep_entries(self.q_n, self.p_n)).long()
        if not policy.keeps_what_lossless_keeps:
            return torch.full_like(self.ids, OPEN)
        # rows whose sums miss 1 move the lossless test by as much: leave those to the policy
        sure = 1 - 2 * ROW_SUM_TOLERANCE[self.q.dtype]
        return torch.where(self.accept * self.p_n < self.q_n * sure, KEPT, OPEN)

    def _ask(self, asked: list[Place]) -> list[int]:
        """Ask about each row's first undecided token; return the rows that go on."""
        going_on = []
        for policy, places in self._by_policy(asked):
            q, ids, coin = _rows(self.q, places), _at(self.ids, places), _at(self.accept, places)
            p = one_hot(ids, q) if self.p is None else _rows(self.p, places)
            decision = policy.decide(q, p, ids, coin)
            kept = decision.kept.tolist()
            stopped = []
            for number, (row, place) in enumerate(places):
                if kept[number]:
                    self.accepted[row] = place + 1
                    going_on.append(row)
                else:
                    stopped.append(number)
            if stopped and decision.residual is not None:
                self._replace(decision.residual, q, places, stopped)
        return going_on

    def _recover(self, refused: list[Place]) -> None:
        """Replace the tokens that were refused by their entries alone."""
        for policy, places in self._by_policy(refused):
            assert isinstance(policy, Entrywise)
            residual = policy.residual_entries(_at(self.q_n, places), _at(self.p_n, places))
            self._replace(residual, _rows(self.q, places), places, range(len(places)))

    def _replace(
        self,
        residual: Residual,
        q: Float[Tensor, "rows vocab"],
        places: list[Place],
        chosen: Sequence[int],
    ) -> None:
        """Draw the tokens that replace refused ones, those chosen among ``places``."""
        if len(chosen) < len(places):
            index = torch.tensor(chosen)
            residual, q, places = residual.at(index), q[index], [places[i] for i in chosen]
        p = None if self.p is None else _rows(self.p, places)
        out = scratch("chain.residual", tuple(q.shape), q.dtype)
        self._draw(residual.law(q, p, _at(self.ids, places), out), places)

    def _draw(self, rows: Float[Tensor, "rows vocab"], places: list[Place]) -> None:
        at = [row for row, _ in places]
        if len(at) == len(self.drafted) == 1:
            self.last = pick(rows, self.draw)
            return
        index = torch.tensor(at)
        self.last[index] = pick(rows, self.draw[index])

    def _by_policy(self, places: list[Place]) -> Iterator[tuple[Policy, list[Place]]]:
        """Yield places that one policy judges, few enough to be worked on together."""
        policies, choice = self.assigned.policies, self.assigned.choice
        for number, policy in enumerate(policies):
            own = places
            if choice is not None:
                own = [place for place in places if int(choice[place]) == number]
            for some in _some(own, self.at_once):
                yield policy, some


def _some(places: list[Place], most: int) -> Iterator[list[Place]]:
    for first in range(0, len(places), most):
        yield places[first : first + most]


def _rows(rows: Shaped[Tensor, "batch K vocab"], places: list[Place]) -> Tensor:
    """Return (N, V) rows at places: a view of one, a copy of several."""
    if len(places) == 1:
        (row, place), *_ = places
        return rows[row, place : place + 1]
    batch, at = zip(*places, strict=True)
    return rows[torch.tensor(batch), torch.tensor(at)]


def _at(values: Tensor, places: list[Place]) -> Tensor:
    """Return (N,) entries of (B, K) values at places."""
    return _rows(values[..., None], places)[:, 0]
