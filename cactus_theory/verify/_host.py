"""What verifying a batch on a CPU takes, token by token or path by path."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import pick

Place = tuple[int, int]

# whole rows are worked on so many entries at a time: few calls on short rows, and views
# instead of copies of long ones
ENTRIES = 2**15


class Places:
    """N places (row of the batch, place in its draft), and the entries of tensors there."""

    def __init__(self, places: Sequence[Place]) -> None:
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


class OnHost:
    """One verification of a batch, whose flags are read on the host.

    Attributes
    ----------
    q_n, p_n : (B, K) float64, entries of the drafted tokens; p_n is 1 for certain drafts.
    accepted, last : accepted counts and the token that follows them, as far as they are known.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        p: Float[Tensor, "batch rows vocab"] | None,
        draft: Draft,
        accept: Float[Tensor, "batch K"],
        draw: Float[Tensor, "batch"],
    ) -> None:
        self.assigned, self.q, self.p, self.ids = assigned, q, p, draft.token_ids
        self.accept, self.draw = accept, draw
        at = self.ids[..., None]
        self.q_n = q[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        if p is None:
            self.p_n = torch.ones_like(self.q_n)
        else:
            self.p_n = p[:, : at.shape[1]].gather(-1, at)[..., 0].double()
        self.drafted = draft.lengths
        self.accepted = [0] * len(self.drafted)
        self.last = self.ids.new_empty(len(self.drafted))
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def _draw(self, rows: Float[Tensor, "rows vocab"], places: Places) -> None:
        """Draw the token that follows the accepted ones of each place's row."""
        if len(self.drafted) == 1:
            self.last = pick(rows, self.draw)
        elif len(places) == 1:
            (row,) = places.rows
            self.last[row : row + 1] = pick(rows, self.draw[row : row + 1])
        else:
            self.last[places.index[0]] = pick(rows, self.draw[places.index[0]])

    def _together(self, places: Sequence[Place]) -> Iterator[Places]:
        """Yield places, few enough to be worked on together."""
        for first in range(0, len(places), self.at_once):
            yield Places(places[first : first + self.at_once])

    def _by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, list[Place]]]:
        """Yield the places of each policy with its number."""
        choice = self.assigned.choice
        for number in range(len(self.assigned.policies)):
            if choice is None:
                yield number, list(places)
            else:
                yield number, [place for place in places if int(choice[place]) == number]
