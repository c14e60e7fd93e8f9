"""The walk along drafted paths on a CPU: where a coin ends it, forwards, backwards, down a tree.

Drafted entries answer most coins (:meth:`Policy.bounds`); where they do not, the node there is
asked (:class:`~cactus_theory.verify.node.Node`). A chain asks forwards up to the first coin that
does not pass; a block follows the alive ratio P forwards, and looks backwards for the last coin
that passes. In a tree a path is a run of sampled tokens; the token drawn at its end may be a
deterministic child, and the walk goes on from it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tolerances import ROW_SUM_TOLERANCE
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN
from cactus_theory.verify.node import Node, Nodes, Residual, ask_recovered, ask_together
from cactus_theory.verify.on_device import raised_entries

# indices of entries of rows: of the batch, of nodes, of tokens
Index = tuple[np.ndarray, np.ndarray, np.ndarray]


class Path:
    """Drafted tokens of one text, each after the one before: a chain, or a path down a tree.

    Token i follows node ``places[i]`` and leads to the next one; ``row`` is that of the batch.
    ``draw`` draws the token that ends the path. ``alive`` is P at the nodes, as far as it is known.

    ``count`` is how many tokens have a law to judge them by, ``cut`` whether the next one has none:
    its row of probabilities is NaN there, and the path ends before it. NaN that is elsewhere shows
    where a row is drawn from. ``accepted`` and ``last`` are how many tokens are accepted and the
    one that follows them, as far as they are known.
    """

    cut = False
    accepted = 0
    last = NO_TOKEN
    walk: "Walk"
    low: list[float]  # bounds on h_n/p_n, or φ
    high: list[float]
    scale: float | None = None  # s of the residual (s q − p)₊ after a rejected token, if known

    def __init__(
        self, row: int, places: Sequence[int], draw: float,
        ids: Sequence[int] = (), coins: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.row, self.places, self.draw, self.ids, self.coins = row, places, draw, ids, coins
        self.count = len(places) - 1
        self.alive = [1.0]
        self.made: dict[int, Node] = {}

    def nodes(self) -> list[Node]:
        """Return the nodes that the accepted tokens and the one after them were emitted at."""
        return [self.node(place) for place in range(self.accepted + 1)]

    def node(self, place: int) -> Node:
        """Return the node before a token, or that at the end."""
        if place not in self.made:
            alive = self.alive[place] if place < len(self.alive) else 1.0
            self.made[place] = self.walk.at(self.row, self.places[place], alive)
        return self.made[place]

    @property
    def is_undecided(self) -> bool:
        """Return whether the row that decides the next token holds NaN."""
        return self.cut and self.accepted == self.count

    def end(self) -> None:
        """End after the accepted tokens, with one from what is left there.

        Where rounding leaves nothing it is drawn from q; NaN is no rounding.
        """
        if self.is_undecided:
            return
        node = self.node(self.accepted)
        known = (node.q, node.drawn_from, self.scale) if self.scale is not None else None
        residual = Residual(*known) if known else node.residual()
        self.last = residual.draw(self.draw)
        if self.last == NO_TOKEN and node.token is not None and residual.mass <= 0:
            self.last = Residual(node.q).draw(self.draw)

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

    def last_open(self, place: int) -> int:
        """Return the last node up to a place whose coin may pass, as far as P and entries tell.

        A coin of P or more fails. So does a coin that fails with (P q − p)₊ in place of the
        residual (P h − p)₊, for policies with h between q and p: such a row is not solved.
        """
        while place and (missing := 1 - self.alive[place]):
            coin = self.coins[place - 1]
            if coin < self.alive[place]:
                if place == self.count:
                    break
                node = self.node(place)
                may_fall = node.policy.between and node.policy.highest > 1 and not node.fixed
                if not may_fall or node.is_known:
                    break
                most = Residual(node.q, node.drawn_from, self.alive[place]).mass
                if coin < most / (most + missing):
                    break
            place -= 1
        return place

    def ends_at(self, place: int) -> bool:
        """Return whether the coin before an open node passes: below R/(R + 1 − P).

        R is Σ (P h − p)₊. P = 1 passes, whatever rounding makes of R: what is below such a node is
        biased. The coin before the end was compared with P.
        """
        missing = 1 - self.alive[place]
        if not place or not missing or place == self.count:
            return True
        mass = self.node(place).residual().mass
        return self.coins[place - 1] < mass / (mass + missing)


class Walk(Nodes):
    """The rows of a round of drafted paths, and their nodes."""

    def __init__(
        self, verifier: Any, assigned: Assignment, q: Float[Tensor, "texts nodes vocab"],
        draft: Draft, paths: Sequence[Path], index: Index,
    ) -> None:  # fmt: skip
        super().__init__(verifier, assigned, q, draft)
        self.paths, self.index = paths, index
        q_n = _entries(self.q, index)
        p_n = np.ones_like(q_n) if self.p is None else _entries(self.p, index)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        for path in paths:
            path.walk = self
        if math.isnan(np.vdot(q_n, p_n)):
            for path, lawless in zip(paths, np.isnan(q_n + p_n), strict=True):
                if lawless[: path.count].any():
                    path.count, path.cut = int(lawless.argmax()), True

    def bound(self, bounds: Iterable[Sequence[Tensor]]) -> None:
        """Give each path the bounds of its tokens, from those by policy, low and high."""
        at = self.index[:2]
        sides = [self.assigned.chosen(own, *at).tolist() for own in zip(*bounds, strict=True)]
        for path, *own in zip(self.paths, *sides, strict=True):
            path.low, path.high = own

    def forwards(self) -> None:
        """Accept token by token, up to the first coin that is not below φ."""
        self.bound(map(self._least, self.assigned.policies))
        waiting = list(self.paths)
        while waiting:
            open_paths = []
            for path in waiting:
                place, coins, low = path.accepted, path.coins, path.low
                while place < path.count and coins[place] < low[place]:
                    place += 1
                path.accepted = place
                if place < path.count and coins[place] < path.high[place]:
                    open_paths.append(path)
            nodes = [path.node(path.accepted) for path in open_paths]
            ask_together(nodes)
            asked = zip(open_paths, nodes, strict=True)
            waiting = [path for path, node in asked if node.exceeds(path.coins[path.accepted])]
            for path in waiting:
                path.accepted += 1
        scales: dict[int, list[list[float]]] = {}
        rejecting: list[Node] = []
        for number, path in enumerate(self.paths):
            if path.accepted == path.count or (node := path.node(path.accepted)).solved is not None:
                continue
            policy = node.policy
            if isinstance(policy, Entrywise):
                if id(policy) not in scales:
                    ceiling = policy.ceiling(self.q_n, self.p_n)
                    scales[id(policy)] = policy.scale(self.q_n, ceiling).tolist()
                path.scale = scales[id(policy)][number][path.accepted]
            elif node.accepts_by_phi:
                rejecting.append(node)
        ask_recovered(rejecting)
        for path in self.paths:
            path.end()

    def _least(self, policy: Policy) -> tuple[Float[Tensor, "paths K"], Float[Tensor, "paths K"]]:
        """Return bounds on φ of each drafted token by its entries, φ twice where they tell."""
        if isinstance(policy, Entrywise):
            return (accepted := policy.acceptance_of(self.q_n, self.p_n)), accepted
        low, high = policy.bounds(self.q_n, self.p_n)
        if low is high:
            return low, low
        # a row's sum may miss 1 and move a bound as far: close calls are the policy's
        low = low * (1 - 2 * ROW_SUM_TOLERANCE[self.rows.dtype])
        return low, torch.full_like(low, math.inf)

    def backwards(self) -> None:
        """Follow P forwards as far as a later coin could still pass; end at the last that does.

        P = 1 always passes and a coin above P never, so few residuals are summed.
        """
        bounds = [policy.bounds(self.q_n, self.p_n) for policy in self.assigned.policies]
        counts, raised = [path.count for path in self.paths], None
        if self.p is None:
            draft = replace(self.draft, counts=counts)
            raised = raised_entries(self.assigned, self.rows, draft)
        if raised is not None:
            self.raised = raised.tolist()
            bounds = [[torch.where(raised.isnan(), of, raised) for of in own] for own in bounds]
        self.bound(bounds)
        if self.draft.sampled is not None:
            for path, *own in zip(self.paths, self.q_n.tolist(), self.p_n.tolist(), strict=True):
                self._widen(path, *own)
        waiting = list(self.paths)
        while waiting:
            waiting = [path for path in waiting if path.advance()]
            nodes = [path.node(len(path.alive) - 1) for path in waiting]
            ask_together(nodes)
            for path, node in zip(waiting, nodes, strict=True):
                path.alive.append(1.0 if node.exceeds(1.0) else min(1.0, node.ratio))
        ends = []
        for path in self.paths:
            if path.cut and path.alive[-1]:  # the path ends before the row of NaN
                path.accepted = path.count
            else:
                ends.append((path, len(path.alive) - 1))
        while ends:
            ends = [(path, path.last_open(place)) for path, place in ends]
            ask_together([path.node(place) for path, place in ends if place < path.count])
            for path, place in ends:
                path.accepted = place
            ends = [(path, place - 1) for path, place in ends if not path.ends_at(place)]
        for path in self.paths:
            path.end()

    def _widen(self, path: Path, q_n: Sequence[float], p_n: Sequence[float]) -> None:
        """Widen a drafted token's bounds where it, or a token beside it, is deterministic.

        There a band has the bounds of tokens that are sampled alone.
        """
        for place, token in enumerate(path.ids):
            at = path.row, path.places[place]
            fixed, policy = self.draft.fixed[at[0]][at[1]], self.assigned.policy(*at)
            if not fixed or policy.highest <= 1:
                continue
            if self.at(*at).solved is None:  # P is not known yet
                path.low[place], path.high[place] = 0.0, math.inf
            elif token in fixed:
                most = policy.highest * q_n[place]
                path.high[place] = most / p_n[place] if p_n[place] > 0 else math.inf

    def accepted_and_last(self) -> tuple[Int[Tensor, "paths"], Int[Tensor, "paths"]]:
        """Return the accepted count of each path and the token after it."""
        accepted = np.array([path.accepted for path in self.paths], np.int64)
        last = np.array([path.last for path in self.paths], np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)


def chains(draft: Draft, accept: Tensor, draw: Tensor) -> tuple[list[Path], Index]:
    """Return each text's drafted chain as a path, with the indices of its tokens."""
    batch, width = draft.token_ids.shape
    ids, draws, coins = draft.ids, draw.tolist(), accept.tolist()
    paths = [
        Path(row, range(count + 1), draws[row], ids[row][:count], coins[row])
        for row, count in enumerate(draft.lengths)
    ]
    return paths, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


class Descent:
    """The walk down one row's tree: paths of sampled tokens, joined by deterministic ones.

    The drafted tokens follow the nodes ``above``. The walk is at ``node``.
    """

    def __init__(self, draft: Draft, row: int, coins: Any, draws: Any) -> None:
        self.draft, self.row, self.above = draft, row, draft.above[row]
        self.ids = draft.ids[row]
        self.coins, self.draws = coins, draws
        self.sampled_child = draft.first_after[row]
        assert draft.sampled is not None
        for place, node in compress(enumerate(self.above), draft.sampled[row].tolist()):
            if self.sampled_child[node] != place:
                raise ValueError(
                    "sampled: at most one token may be sampled after a node; got tokens "
                    f"{self.sampled_child[node]} and {place} of row {row}"
                )
        self.runs: list[Path] = []
        self.node = 0

    def nodes(self) -> list[Node]:
        """Return the nodes that the tokens were emitted at, in order."""
        return [node for run in self.runs for node in run.nodes()]

    def accepted(self) -> list[int]:
        """Return the places of the accepted tokens, in order."""
        nodes = [node for run in self.runs for node in run.places[: run.accepted + 1]]
        return [node - 1 for node in nodes[1:]]

    def run(self) -> Path:
        """Return the path of sampled tokens from the current node on."""
        places, node = [], self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]
        ids, coins = ([of[place] for place in places] for of in (self.ids, self.coins))
        self.runs.append(Path(self.row, nodes, self.draws[len(self.runs)], ids, coins))
        return self.runs[-1]

    def goes_on(self) -> bool:
        """Move past the judged path; return whether the token drawn after it is a drafted child."""
        run = self.runs[-1]
        end = run.places[run.accepted]
        children = zip(self.above, self.ids, strict=False)
        caught = [place for place, child in enumerate(children) if child == (end, run.last)]
        # a rejected token is drawn again only by rounding, and the tokens below it are biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.node = caught[0] + 1
        return True


def index_of(paths: Sequence[Path]) -> Index:
    """Return the indices of the tokens of paths; those beyond a path's last one are arbitrary."""
    nodes, ids = np.zeros((2, len(paths), max(path.count for path in paths)), dtype=np.int64)
    for number, path in enumerate(paths):
        nodes[number, : path.count] = path.places[:-1]
        ids[number, : path.count] = path.ids
    return np.array([[path.row] for path in paths]), nodes, ids


def _entries(rows: np.ndarray | Tensor, index: Index) -> Float[np.ndarray, "paths K"]:
    entries = rows[index]
    if isinstance(entries, np.ndarray):
        return entries.astype(np.float64, copy=False)
    return entries.double().numpy()
