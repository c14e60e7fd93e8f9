"""What verifying a batch on a CPU takes, token by token or path by path."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory.optimum.soft import PRECISIONS
from cactus_theory.policies._records import UNSCALED
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import BLOCKED_FROM, pick, pick_one

Place = tuple[int, int]

# whole rows are worked on so many entries at a time: few calls on short rows, and views
# instead of copies of long ones
ENTRIES = 2**15
# so many rows are worked on together sooner than one by one
MANY = 12


class Places:
    """N places (row of the batch, place in its draft), and the entries of tensors there.

    ``indices`` are those of tensors, where they differ from the places.
    """

    def __init__(self, places: Sequence[Place], indices: Sequence[Place] | None = None) -> None:
        self.places, self.indices = places, places if indices is None else indices

    def __len__(self) -> int:
        return len(self.places)

    def of(self, values: Shaped[Tensor, "batch K *rest"]) -> Shaped[Tensor, "N *rest"]:
        """Return the entries at the places: a view of one, a copy of several."""
        if len(self.places) == 1:
            row, place = self.indices[0]
            return values[row, place : place + 1]
        return values[self._index]

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        rows, nodes = zip(*self.indices, strict=True)
        return torch.tensor(rows), torch.tensor(nodes)


class OnHost:
    """One verification of a batch, whose flags are read on the host.

    ``q_n``, ``p_n`` (B, K) float64 are entries of the drafted tokens; p_n is 1 for certain drafts.
    ``lengths`` says how many drafted tokens of each row have a law to judge them by, ``cuts`` maps
    a row to the place of its first one without, where its path is cut. Such a row of probabilities
    is NaN at the drafted token; NaN that is elsewhere shows where a row is drawn from. ``accepted``
    and ``last`` are counts and the token that follows them, as far as they are known.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        draft: Draft,
        draws: list[float],
    ) -> None:
        self.assigned, self.q, self.p, self.ids = assigned, q, p, draft.token_ids
        self.draws = draws
        q_n = self._entries(q)
        p_n = np.ones_like(q_n) if p is None else self._entries(p)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        self.lengths, self.cuts = list(draft.lengths), {}
        if math.isnan(np.vdot(q_n, p_n)):
            self._cut()
        self.accepted = [0] * len(self.lengths)
        self.last = [0] * len(self.lengths)
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def _entries(self, rows: Float[Tensor, "texts nodes vocab"]) -> Float[np.ndarray, "batch K"]:
        if rows.dtype not in PRECISIONS:
            entries = rows[:, : self.ids.shape[1]].gather(-1, self.ids[..., None])
            return entries[..., 0].double().numpy()
        return rows.detach().numpy()[self._index].astype(np.float64, copy=False)

    @cached_property
    def _index(self) -> tuple[np.ndarray, ...]:
        batch, width = self.ids.shape
        return np.arange(batch)[:, None], np.arange(width), self.ids.numpy()

    def _row_index(self, place: Place) -> Place:
        """Return the indices of rows of probabilities at a place: its node."""
        return place

    def _places(self, places: Sequence[Place]) -> Places:
        return Places(places, [*map(self._row_index, places)])

    def _cut(self) -> None:
        """End each path before its first drafted token without a law."""
        lawless = (self.q_n + self.p_n).isnan()
        for row, count in enumerate(self.lengths):
            places = lawless[row, :count].nonzero()
            if len(places):
                self.cuts[row] = self.lengths[row] = int(places[0])

    def _draw(self, row: int, law: Float[Tensor, "vocab"]) -> None:
        self.last[row] = pick_one(law, self.draws[row])

    def _draw_each(
        self, rows: Sequence[int], laws: Sequence[Float[Tensor, "vocab"]] | Tensor
    ) -> None:
        """Draw the token that follows the accepted ones of each row."""
        if self._one_by_one(len(rows)):
            for row, law in zip(rows, laws, strict=True):
                self._draw(row, law)
            return
        draws = torch.tensor([self.draws[row] for row in rows], dtype=torch.float64)
        for first in range(0, len(rows), self.at_once):
            part = slice(first, first + self.at_once)
            chunk = laws[part] if isinstance(laws, Tensor) else torch.stack(list(laws[part]))
            for row, token in zip(rows[part], pick(chunk, draws[part]).tolist(), strict=True):
                self.last[row] = token

    def _one_by_one(self, count: int) -> bool:
        """Return whether rows are worked on one by one: few, or long ones."""
        return min(count, self.at_once) < MANY

    def _accepted_and_last(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        accepted, last = np.array(self.accepted, np.int64), np.array(self.last, np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)

    def _chunks(self, places: Sequence[Place]) -> Iterator[Places]:
        """Yield places, few enough to be worked on together."""
        for first in range(0, len(places), self.at_once):
            yield self._places(places[first : first + self.at_once])

    def _by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, list[Place]]]:
        """Yield the places of each policy with its number."""
        choice = self.assigned.choice
        for number in range(len(self.assigned.policies)):
            if choice is None:
                yield number, list(places)
            else:
                yield number, [at for at in places if int(choice[self._row_index(at)]) == number]


def residual(q: np.ndarray, p: np.ndarray, scale: float, out: np.ndarray) -> None:
    """Write (``scale`` q − p)₊ of a row to ``out``."""
    if scale == UNSCALED:
        np.subtract(q, p, out=out)
    else:
        np.multiply(q, scale, out=out)
        np.subtract(out, p, out=out)
    if len(out) < BLOCKED_FROM:
        np.maximum(out, 0.0, out=out)
    else:  # half the time for a long row, twice as long for a short one
        torch.from_numpy(out).clamp_(min=0.0)
