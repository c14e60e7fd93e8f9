"""A chain on a CPU: whole rows are read only where a decision needs them.

Flags are read on the host, which is free for tensors on a CPU. A token is kept without reading
its rows if its policy decides from the drafted entries, or if lossless sampling keeps it and the
policy keeps whatever lossless sampling keeps. Among the others, the policy is called for the
first undecided token of each row only.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory._arguments import ROW_SUM_TOLERANCE
from cactus_theory._scratch import scratch
from cactus_theory.policies import Entrywise
from cactus_theory.policies._base import keep_probability, one_hot
from cactus_theory.policies._residual import Residual
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import pick

# whole rows are worked on so many entries at a time: few calls on short rows, and views
# instead of copies of long ones
ENTRIES = 2**15
REFUSED, KEPT, OPEN = 0, 1, 2


class Places:
    """N places (row of the batch, place in its draft), and the entries of tensors there."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self.places = places
        self.rows = [row for row, _ in places]
        if len(places) > 1:
            self.index = torch.tensor(self.rows), torch.tensor([place for _, place in places])

    def __len__(self) -> int:
        return len(self.places)

    def of(self, values: Shaped[Tensor, "batch K *rest"]) -> Shaped[Tensor, "N *rest"]:
        """Return the entries at the places: a view of one, a copy of several."""
        if len(self.places) == 1:
            row, place = self.places[0]
            return values[row, place : place + 1]
        return values[self.index]

    def some(self, chosen: Sequence[int]) -> "Places":
        """Return the places with these indices."""
        return Places([self.places[number] for number in chosen])


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
        self.last = self.ids.new_empty(len(self.drafted))
        self.at_once = max(1, ENTRIES // q.shape[-1])
        self.ceilings: dict[int, Tensor] = {}  # of entrywise policies, by number

    def run(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return accepted counts and the token that follows them."""
        status = self._status().tolist()
        waiting = range(len(self.drafted))
        passed: list[tuple[int, int]] = []
        refused: list[tuple[int, int]] = []
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
        for number, places in self._by_policy(refused):
            policy = self.assigned.policies[number]
            assert isinstance(policy, Entrywise)
            entries = places.of(self.q_n), places.of(self.ceilings[number])
            self._replace(policy.residual_entries(*entries), places.of(self.q), places)
        for first in range(0, len(passed), self.at_once):
            places = Places(passed[first : first + self.at_once])
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

    def _ask(self, asked: list[tuple[int, int]]) -> list[int]:
        """Let the policies decide each row's first undecided token; return the rows that go on."""
        going_on = []
        for number, places in self._by_policy(asked):
            policy = self.assigned.policies[number]
            q, ids = places.of(self.q), places.of(self.ids)
            p = one_hot(ids, q) if self.p is None else places.of(self.p)
            decision = policy.decide(q, p, ids, places.of(self.accept))
            stopped = []
            for entry, kept in enumerate(decision.kept.tolist()):
                if kept:
                    row = places.rows[entry]
                    self.accepted[row] += 1
                    going_on.append(row)
                else:
                    stopped.append(entry)
            if not stopped or decision.residual is None:
                continue
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

    def _draw(self, rows: Float[Tensor, "rows vocab"], places: Places) -> None:
        if len(self.drafted) == 1:
            self.last = pick(rows, self.draw)
        elif len(places) == 1:
            (row,) = places.rows
            self.last[row : row + 1] = pick(rows, self.draw[row : row + 1])
        else:
            self.last[places.index[0]] = pick(rows, self.draw[places.index[0]])

    def _by_policy(self, places: list[tuple[int, int]]) -> Iterator[tuple[int, Places]]:
        """Yield places with the number of their policy, few enough to be worked on together."""
        choice = self.assigned.choice
        for number in range(len(self.assigned.policies)):
            own = places
            if choice is not None:
                own = [place for place in places if int(choice[place]) == number]
            for first in range(0, len(own), self.at_once):
                yield number, Places(own[first : first + self.at_once])
