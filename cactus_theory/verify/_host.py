"""What verifying a batch on a CPU reads and draws: rows where a decision needs them, and tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.optimum.soft import PRECISIONS
from cactus_theory.policies._records import UNSCALED
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import BLOCKED_FROM, NO_TOKEN, pick, pick_one

# (P h − p)₊ of a node: the row, or scales s of (s q − p)₊ beside certain tokens and of these
Left = Tensor | tuple[float, float | None]
# indices of entries of rows: of the batch, of nodes, of tokens
Index = tuple[np.ndarray, np.ndarray, np.ndarray]

# whole rows are worked on so many entries at a time: few calls on short rows, and views
# instead of copies of long ones
ENTRIES = 2**15
# so many rows are worked on together sooner than one by one
MANY = 12


class Run:
    """Drafted tokens of one text, each after the one before: a chain, or a path down a tree.

    Token i follows node ``nodes[i]`` and leads to the next one; ``row`` is that of the batch.
    ``certain`` has by place i the ids that are certain there, where they matter to h, and ``ahead``
    the h_n of those at the last node, where the policy looked ahead. ``draw`` draws the token that
    ends the run.

    ``count`` is how many tokens have a law to judge them by, ``cut`` whether the next one has none:
    its row of probabilities is NaN there, and the path ends before it. NaN that is elsewhere shows
    where a row is drawn from. ``accepted`` and ``last`` are how many tokens are accepted and the
    one that follows them, as far as they are known.
    """

    certain: Mapping[int, Sequence[int]] = MappingProxyType({})
    ahead: Mapping[int, float] = MappingProxyType({})
    cut = False
    accepted = 0
    last = NO_TOKEN
    # of blocks: entries of the drafted tokens, and bounds on their h_n/p_n
    q_n: list[float]
    p_n: list[float]
    low: list[float]
    high: list[float]
    # P h_n/p_n at the node that was followed last
    ratio: float

    def __init__(
        self,
        row: int,
        nodes: Sequence[int],
        draw: float,
        ids: Sequence[int] = (),
        coins: Sequence[float] = (),
    ) -> None:
        self.row, self.nodes, self.draw, self.ids, self.coins = row, nodes, draw, ids, coins
        self.count = len(nodes) - 1
        self.alive = [1.0]  # P at the nodes, as far as it is known
        self.left: dict[int, Left] = {}  # (P h − p)₊ where the run may end, once known

    def advance(self) -> bool:
        """Follow P from token to token while entries tell it; return whether a row is needed.

        A ratio of 0 stays 0: such a path is not followed any further.
        """
        alive, low, high = self.alive, self.low, self.high
        while alive[-1] and (place := len(alive) - 1) < self.count:
            least, most = alive[-1] * low[place], alive[-1] * high[place]
            if least >= 1 or least == most:
                alive.append(min(1.0, least))
            else:
                return self.cut or self._may_pass(place)
        return False

    def _may_pass(self, place: int) -> bool:
        """Return whether any coin from this drafted token on could pass."""
        most = self.alive[-1]
        for later in range(place, self.count):
            most = min(1.0, most * self.high[later])
            if self.coins[later] < most:
                return True
        return False

    def last_below(self, place: int) -> int:
        """Return the last node up to a place whose coin is below P: others cannot pass."""
        while place and self.coins[place - 1] >= self.alive[place]:
            place -= 1
        return place

    def passes(self, place: int, mass: float) -> bool:
        """Return whether the run ends at a node with R = Σ (P h − p)₊ = ``mass``: coin < R/(R+1−P).

        P = 1 does, whatever rounding makes of R: what is below such a node is biased.
        """
        missing = 1 - self.alive[place]
        return not place or not missing or self.coins[place - 1] < mass / (mass + missing)


Place = tuple[Run, int]


class OnHost:
    """Rows of some runs, whose flags are read on the host, and what is drawn from them.

    ``q_n``, ``p_n`` (runs, K) float64 are entries of the drafted tokens; p_n is 1 for certain
    drafts.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        runs: Sequence[Run],
        index: Index,
    ) -> None:
        self.assigned, self.q, self.p, self.runs = assigned, q, p, runs
        self.choice = None if assigned.choice is None else assigned.choice.tolist()
        q_n = _entries(q, index)
        p_n = np.ones_like(q_n) if p is None else _entries(p, index)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        if math.isnan(np.vdot(q_n, p_n)):
            for run, lawless in zip(runs, np.isnan(q_n + p_n), strict=True):
                if lawless[: run.count].any():
                    run.count, run.cut = int(lawless.argmax()), True
        self.at_once = max(1, ENTRIES // q.shape[-1])

    def number(self, run: Run, place: int) -> int:
        """Return which policy judges what follows a node."""
        return 0 if self.choice is None else self.choice[run.row][run.nodes[place]]

    def by_policy(self, places: Sequence[Place]) -> Iterator[tuple[int, Sequence[Place]]]:
        """Yield the places of each policy with its number."""
        if self.choice is None:
            yield 0, places
            return
        for number in range(len(self.assigned.policies)):
            yield number, [at for at in places if self.number(*at) == number]

    def chunks(self, places: Sequence[Place]) -> Iterator[Sequence[Place]]:
        """Yield places, few enough to be worked on together."""
        for first in range(0, len(places), self.at_once):
            yield places[first : first + self.at_once]

    def one_by_one(self, count: int) -> bool:
        """Return whether rows are worked on one by one: few, or long ones."""
        return min(count, self.at_once) < MANY

    def draw_each(
        self, runs: Sequence[Run], laws: Sequence[Float[Tensor, "vocab"]] | Tensor
    ) -> None:
        """Draw the token that ends each run."""
        if self.one_by_one(len(runs)):
            for run, law in zip(runs, laws, strict=True):
                run.last = pick_one(law, run.draw)
            return
        draws = torch.tensor([run.draw for run in runs], dtype=torch.float64)
        for first in range(0, len(runs), self.at_once):
            part = slice(first, first + self.at_once)
            chunk = laws[part] if isinstance(laws, Tensor) else torch.stack(list(laws[part]))
            for run, token in zip(runs[part], pick(chunk, draws[part]).tolist(), strict=True):
                run.last = token

    def accepted_and_last(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Return how many tokens of each run are accepted, and the token after them."""
        accepted = np.array([run.accepted for run in self.runs], np.int64)
        last = np.array([run.last for run in self.runs], np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)


def chains(
    draft: Draft, draws: Sequence[float], coins: Sequence[Sequence[float]] | None = None
) -> tuple[list[Run], Index]:
    """Return each text's drafted chain as a run, with the indices of its tokens."""
    batch, width = draft.token_ids.shape
    lengths = enumerate(draft.lengths)
    if coins is None:
        runs = [Run(row, range(count + 1), draws[row]) for row, count in lengths]
    else:
        ids = draft.token_ids.tolist()
        runs = [
            Run(row, range(count + 1), draws[row], ids[row], coins[row]) for row, count in lengths
        ]
    return runs, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


def index_of(runs: Sequence[Run]) -> Index:
    """Return the indices of the tokens of runs; those beyond a run's last one are arbitrary."""
    nodes, ids = np.zeros((2, len(runs), max(run.count for run in runs)), dtype=np.int64)
    for number, run in enumerate(runs):
        nodes[number, : run.count] = run.nodes[:-1]
        ids[number, : run.count] = run.ids
    return np.array([[run.row] for run in runs]), nodes, ids


def _entries(rows: Float[Tensor, "texts nodes vocab"], index: Index) -> Float[np.ndarray, "runs K"]:
    if rows.dtype not in PRECISIONS:
        return rows[tuple(map(torch.from_numpy, index))].double().numpy()
    return rows.detach().numpy()[index].astype(np.float64, copy=False)


def rows_at(places: Sequence[Place]) -> Any:
    """Return what indexes rows at the nodes of places: a view of one, copies of several."""
    if len(places) == 1:
        run, place = places[0]
        node = run.nodes[place]
        return run.row, slice(node, node + 1)
    return (
        torch.tensor([run.row for run, _ in places]),
        torch.tensor([run.nodes[place] for run, place in places]),
    )


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


def workable(rows: Float[Tensor, "batch K vocab"]) -> Float[Tensor, "batch K vocab"]:
    """Return rows that passes in numpy can read: float32 for those of half precision."""
    return rows if rows.dtype in PRECISIONS else rows.float()
