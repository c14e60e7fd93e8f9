"""Drafted paths on a CPU with their coins and alive ratios P, and the walk down a tree."""

from collections.abc import Mapping, Sequence
from itertools import compress
from types import MappingProxyType

import numpy as np
from jaxtyping import Float
from torch import Tensor

from cactus_theory.verify._residual import Residual
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one

# indices of entries of rows: of the batch, of nodes, of tokens
Index = tuple[np.ndarray, np.ndarray, np.ndarray]


class Run:
    """Drafted tokens of one text, each after the one before: a chain, or a path down a tree.

    Token i follows node ``nodes[i]`` and leads to the next one; ``row`` is that of the batch.
    ``deterministic`` has by place i the ids that are deterministic there, where they matter to h.
    ``draw`` draws the token that ends the run.

    ``count`` is how many tokens have a law to judge them by, ``cut`` whether the next one has none:
    its row of probabilities is NaN there, and the path ends before it. NaN that is elsewhere shows
    where a row is drawn from. ``accepted`` and ``last`` are how many tokens are accepted and the
    one that follows them, as far as they are known.
    """

    deterministic: Mapping[int, Sequence[int]] = MappingProxyType({})
    cut = False
    accepted = 0
    last = NO_TOKEN
    # index among the runs, and the entries of q and p at the tokens
    number: int
    q_n: list[float]
    p_n: list[float]
    # bounds on h_n/p_n of the tokens
    low: list[float]
    high: list[float]
    # P h_n/p_n at the last node that was asked, 1 where it exceeds a share unsolved
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
        self.residuals: dict[int, Residual] = {}  # (P h − p)₊ where the run may end, once known

    def advance(self) -> bool:
        """Follow P from token to token as far as entries suffice; return whether a row is needed.

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
        """Return the last node up to a place with a coin below P: no other node can pass."""
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


def chains(draft: Draft, accept: Tensor, draw: Tensor) -> tuple[list[Run], Index]:
    """Return each text's drafted chain as a run, with the indices of its tokens."""
    batch, width = draft.token_ids.shape
    ids, draws, coins = (part.tolist() for part in (draft.token_ids, draw, accept))
    runs = [
        Run(row, range(count + 1), draws[row], ids[row], coins[row])
        for row, count in enumerate(draft.lengths)
    ]
    return runs, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


def index_of(runs: Sequence[Run]) -> Index:
    """Return the indices of the tokens of runs; those beyond a run's last one are arbitrary."""
    nodes, ids = np.zeros((2, len(runs), max(run.count for run in runs)), dtype=np.int64)
    for number, run in enumerate(runs):
        nodes[number, : run.count] = run.nodes[:-1]
        ids[number, : run.count] = run.ids
    return np.array([[run.row] for run in runs]), nodes, ids


class Descent:
    """The walk down one row's tree.

    The drafted tokens follow the nodes ``above``. The walk is at ``node``. ``path`` holds the
    places of the accepted tokens in order, ``charged`` the nodes where a token was emitted that
    anything was drafted after, in order, with the alive ratio there, and ``last`` the token that
    ends the round, so far; ``draws_taken`` were drawn.
    """

    def __init__(self, draft: Draft, row: int, ids: list[int]) -> None:
        self.draft, self.row, self.ids, self.above = draft, row, ids, draft.above[row]
        sampled = [*compress(enumerate(self.above), draft.flags[row][0])]
        self.sampled_child = {node: place for place, node in sampled}
        for place, node in sampled:
            if self.sampled_child[node] != place:
                raise ValueError(
                    "sampled: at most one token may be sampled after a node; got tokens "
                    f"{place} and {self.sampled_child[node]} of row {row}"
                )
        self.path: list[int] = []
        self.charged: dict[int, float] = {}
        self.node, self.last, self.draws_taken = 0, NO_TOKEN, 0

    def run(self, assigned: Assignment, coins: Sequence[float], draws: Sequence[float]) -> Run:
        """Return the run of sampled tokens from the current node on."""
        places, node = [], self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]
        ids, own = [self.ids[place] for place in places], [coins[place] for place in places]
        run = Run(self.row, nodes, draws[self.draws_taken], ids, own)
        run.deterministic = {
            place: fixed
            for place, node in enumerate(nodes)
            if (fixed := self.draft.fixed[self.row][node])
            and assigned.policy(self.row, node).highest > 1  # else h = q, whatever is drafted
        }
        return run

    def go_on(self, run: Run) -> bool:
        """Move past a judged run; return whether the token drawn after it is a drafted child."""
        taken = run.nodes[: run.accepted + 1]
        end = taken[-1]
        self.charged |= zip(taken if end in self.above else taken[:-1], run.alive, strict=False)
        self.path += [node - 1 for node in taken[1:]]
        self.last, self.draws_taken = run.last, self.draws_taken + 1
        if run.last not in self.ids:
            return False
        children = zip(self.above, self.ids, strict=False)
        caught = [place for place, child in enumerate(children) if child == (end, run.last)]
        # a rejected token is drawn again only by rounding, and the tokens below it are biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.path += caught
        self.node = caught[0] + 1
        return True

    def go_freely(self, q: Float[Tensor, "batch K1 vocab"], draws: Sequence[float]) -> bool:
        """Draw from q at nodes without a drafted token; return whether the walk goes on."""
        while self.node not in self.sampled_child and not self.draft.fixed[self.row][self.node]:
            run = Run(self.row, [self.node], draws[self.draws_taken])
            run.last = pick_one(q[self.row, self.node], run.draw)
            if not self.go_on(run):
                return False
        return True
