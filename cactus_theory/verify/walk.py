"""Follow drafted paths on a CPU, and find where a coin ends each path: chains, blocks, trees.

The drafted token's q_n and p_n decide most coins (:meth:`Policy.bounds`). Only for the other coins
is a row read, by a node (:class:`~cactus_theory.verify.node.Node`). A chain moves forwards to the
first coin that does not pass. A block computes the alive ratio P of each node (the probability that
the path down to the node is accepted, given that it was drafted) forwards, then looks backwards for
the last coin that passes. In a tree a path is a run of sampled tokens, at whose end a token is
drawn. If this token was also drafted there without sampling (a deterministic child), the walk goes
on from the child.
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

from cactus_theory.base.tensors import as_list, from_numpy
from cactus_theory.base.tolerances import ROW_SUM_TOLERANCE
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN
from cactus_theory.verify.node import Node, Nodes, Residual, ask_recovered, ask_together
from cactus_theory.verify.on_device import raised_entries

# index arrays of single row entries: of texts, of nodes, of tokens
Index = tuple[np.ndarray, np.ndarray, np.ndarray]


class Path:
    """Drafted tokens of one text, each after the token before it: a chain, or a path down a tree.

    ``row`` is the text's row in the batch. A ``place`` i counts along the path: token i follows
    node ``node_numbers[i]`` and leads to node ``node_numbers[i + 1]``. The coin ``draw`` draws the
    token that ends the path. ``alive`` is P at the nodes, as far as P is known.

    ``count`` is the number of tokens that can be judged. ``cut`` says that the token after them has
    NaN for its entry of q or p, so that the path ends before this token. NaN in other entries is
    found when a token is drawn from the row. ``accepted`` is the number of accepted tokens and
    ``last`` the token after them, as far as they are known.
    """

    cut = False
    accepted = 0
    last = NO_TOKEN
    round: Nodes  # not the Walk, which holds this path: a cycle would keep the rows of a round
    low: list[float]  # bounds on h_n/p_n, or φ
    high: list[float]
    scale: float | None = None  # s of the residual (s q − p)₊ after a rejected token, if known

    def __init__(
        self, row: int, node_numbers: Sequence[int], draw: float,
        ids: Sequence[int] = (), coins: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.row, self.node_numbers, self.draw = row, node_numbers, draw
        self.ids, self.coins, self.count = ids, coins, len(node_numbers) - 1
        self.alive = [1.0]
        self.made: dict[int, Node] = {}

    def nodes(self) -> list[Node]:
        """Return the nodes where the accepted tokens and the token after them were emitted."""
        return [self.node(place) for place in range(self.accepted + 1)]

    def node(self, place: int) -> Node:
        """Return the node that the token at ``place`` follows, or the last node of the path."""
        if place not in self.made:
            alive = self.alive[place] if place < len(self.alive) else 1.0
            self.made[place] = self.round.at(self.row, self.node_numbers[place], alive)
        return self.made[place]

    @property
    def is_undecided(self) -> bool:
        """Return whether the token after the accepted tokens is undecided: its q or p is NaN."""
        return self.cut and self.accepted == self.count

    def end(self) -> None:
        """End the path after the accepted tokens, and draw the token after them from the residual.

        Where rounding leaves the residual without mass the token is drawn from q. If the residual
        has NaN, ``last`` stays −1.
        """
        if self.is_undecided:
            return
        node = self.node(self.accepted)
        if self.scale is None:
            residual = node.residual()
        else:
            residual = Residual(node.q, node.drawn_from, self.scale)
        self.last = residual.draw(self.draw)
        if self.last == NO_TOKEN and node.token is not None and residual.mass <= 0:
            self.last = Residual(node.q).draw(self.draw)

    def advance(self) -> bool:
        """Extend ``alive`` while q_n and p_n of tokens decide P; return whether a row is needed.

        Once P is 0 it stays 0, so the path is not followed any further. In a ``cut`` path every P
        is needed, to know whether the row with NaN is reached (P > 0).
        """
        alive, low, high = self.alive, self.low, self.high
        while alive[-1] and len(alive) <= self.count:
            place = len(alive) - 1
            least, most = alive[-1] * low[place], alive[-1] * high[place]
            if least >= 1 or least == most:  # P of the next node is known from the bounds
                alive.append(min(1.0, least))
            else:
                return self.cut or self._may_pass(place)
        return False

    def _may_pass(self, place: int) -> bool:
        """Return whether the coin of the token at ``place`` or of any later token could pass."""
        most = self.alive[-1]
        for later in range(place, self.count):
            most = min(1.0, most * self.high[later])
            if self.coins[later] < most:
                return True
        return False

    def last_open(self, place: int) -> int:
        """Return the last node up to ``place`` whose coin may pass, without solving a row.

        The coin passes below R/(R + 1 − P) with R = Σ (P h − p)₊. This threshold is at most P, so a
        coin of P or more fails. If h lies between q and p, R is at most Σ (P q − p)₊; a coin that
        fails with this sum fails with R, too.
        """
        while place and (missing := 1 - self.alive[place]):
            coin = self.coins[place - 1]
            if coin < self.alive[place]:
                if place == self.count:  # the coin of the end passes below P
                    break
                node = self.node(place)
                # beside deterministic tokens h may exceed max(p, q); with ``highest`` 1, h is q
                bounded = node.policy.between and node.policy.highest > 1 and not node.fixed
                if not bounded or node.is_known:
                    break
                most = Residual(node.q, node.drawn_from, self.alive[place]).mass
                if coin < most / (most + missing):
                    break
            place -= 1
        return place

    def ends_at(self, place: int) -> bool:
        """Return whether the coin of the node at ``place`` passes: is below R/(R + 1 − P).

        R is Σ (P h − p)₊. At P = 1 every coin passes, even if rounding makes R = 0: otherwise the
        walk down a tree might go on to drafted tokens whose law a rejection has biased. The coin of
        the path's last node has already passed in :meth:`last_open`.
        """
        missing = 1 - self.alive[place]
        if not place or not missing or place == self.count:
            return True
        mass = self.node(place).residual().mass
        return self.coins[place - 1] < mass / (mass + missing)


class Walk:
    """The paths of a round, with their nodes and the drafted tokens' entries of q and p."""

    def __init__(
        self, verifier: Any, assigned: Assignment, q: Float[Tensor, "texts nodes vocab"],
        draft: Draft, paths: Sequence[Path], index: Index,
    ) -> None:  # fmt: skip
        self.nodes = nodes = Nodes(verifier, assigned, q, draft)
        self.assigned, self.draft, self.p = nodes.assigned, draft, nodes.p
        self.paths, self.index = paths, index
        q_n = _entries(nodes.q, index)
        p_n = np.ones_like(q_n) if self.p is None else _entries(self.p, index)
        self.q_n, self.p_n = from_numpy(q_n), from_numpy(p_n)
        for path in paths:
            path.round = nodes
        if math.isnan(np.vdot(q_n, p_n)):  # one pass: NaN if an entry is NaN
            for path, lawless in zip(paths, np.isnan(q_n + p_n), strict=True):
                if lawless[: path.count].any():
                    path.count, path.cut = int(lawless.argmax()), True

    def bound(self, bounds: Iterable[Sequence[Tensor]]) -> None:
        """Set each path's bounds ``low`` and ``high`` on h_n/p_n, from a pair for each policy."""
        at = self.index[:2]  # texts and nodes
        by_side = zip(*bounds, strict=True)  # lower bounds of all policies, then upper bounds
        lows, highs = (as_list(self.assigned.chosen(values, *at)) for values in by_side)
        for path, low, high in zip(self.paths, lows, highs, strict=True):
            path.low, path.high = low, high

    def forwards(self) -> None:
        """Accept tokens one by one, up to the first coin that is not below φ (a chain).

        In each pass of the loop every path moves on while bounds on φ decide its coins. The nodes
        at which paths then wait are computed together, and each node decides one coin. A path
        leaves the loop at the first coin that fails, or at the end of the draft. Then the residuals
        of rejected tokens are prepared for all paths together, and each path draws its last token.
        """
        self.bound(map(self._bounds, self.assigned.policies))
        waiting = list(self.paths)
        while waiting:
            open_paths: list[Path] = []
            for path in waiting:
                place, coins, low = path.accepted, path.coins, path.low
                while place < path.count and coins[place] < low[place]:
                    place += 1
                path.accepted = place
                if place < path.count and coins[place] < path.high[place]:
                    open_paths.append(path)
            nodes = [path.node(path.accepted) for path in open_paths]
            ask_together(nodes)
            pairs = zip(open_paths, nodes, strict=True)
            waiting = [path for path, node in pairs if node.exceeds(path.coins[path.accepted])]
            for path in waiting:
                path.accepted += 1
        # by id of the policy, the residual's scale s after each drafted token of each path
        scales: dict[int, list[list[float]]] = {}
        rejecting: list[Node] = []
        for number, path in enumerate(self.paths):
            if path.accepted == path.count:  # no drafted token was rejected
                continue
            node = path.node(path.accepted)
            if node.solved is not None:  # the solved row has the residual
                continue
            policy = node.policy
            if isinstance(policy, Entrywise):
                if id(policy) not in scales:
                    ceiling = policy.ceiling(self.q_n, self.p_n)
                    scales[id(policy)] = as_list(policy.scale(self.q_n, ceiling))
                path.scale = scales[id(policy)][number][path.accepted]
            elif node.accepts_by_phi:
                rejecting.append(node)
        ask_recovered(rejecting)
        for path in self.paths:
            path.end()

    def _bounds(self, policy: Policy) -> tuple[Float[Tensor, "paths K"], Float[Tensor, "paths K"]]:
        """Return lower and upper bounds on φ of drafted tokens; φ twice if φ is known exactly."""
        if isinstance(policy, Entrywise):
            phi = policy.acceptance_of(self.q_n, self.p_n)
            return phi, phi
        low, high = policy.bounds(self.q_n, self.p_n)
        if low is high:  # one tensor: φ is known exactly
            return low, low
        # a row's sum may miss 1 and move a bound by as much, so the policy decides close calls
        low = low * (1 - 2 * ROW_SUM_TOLERANCE[self.nodes.rows.dtype])
        # an upper bound would save little: a rejected token's residual needs the row in any case
        return low, torch.full_like(low, math.inf)

    def backwards(self) -> None:
        """Find the last coin of each path that passes, and end the path there (a block).

        First P is followed forwards, as far as a later coin could still pass; a node is solved
        where q and p of the token do not decide P. Then coins are compared backwards from the last
        node with a known P, until one passes. Node 0 always passes, so the search ends. A coin
        passes below R/(R + 1 − P), with R the sum of the residual. This is 1 at P = 1 and at most P
        otherwise, so that R is summed at few nodes: those with P < 1 and a coin below P.
        """
        bounds = [policy.bounds(self.q_n, self.p_n) for policy in self.assigned.policies]
        counts, raised = [path.count for path in self.paths], None
        if self.p is None:  # policies may look ahead, up to a token with NaN
            draft = replace(self.draft, counts=counts)
            raised = raised_entries(self.assigned, self.nodes.rows, draft)
        if raised is not None:
            self.nodes.raised = as_list(raised)
            unknown = raised.isnan()  # elsewhere the bounds are h_n itself, as p_n = 1
            bounds = [[torch.where(unknown, side, raised) for side in sides] for sides in bounds]
        self.bound(bounds)
        if self.draft.sampled is not None:
            rows = zip(self.paths, as_list(self.q_n), as_list(self.p_n), strict=True)
            for path, q_n, p_n in rows:
                self._widen(path, q_n, p_n)
        waiting = list(self.paths)
        while waiting:
            waiting = [path for path in waiting if path.advance()]
            nodes = [path.node(len(path.alive) - 1) for path in waiting]
            ask_together(nodes)
            for path, node in zip(waiting, nodes, strict=True):
                path.alive.append(1.0 if node.exceeds(1.0) else min(1.0, node.ratio))
        ends: list[tuple[Path, int]] = []
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
        """Widen the bounds on the acceptance of a sampled token beside deterministic tokens.

        The bounds of a band hold only at nodes where no token but the sampled one was drafted.
        """
        for place, token in enumerate(path.ids):
            row, node = path.row, path.node_numbers[place]
            fixed, policy = self.draft.fixed[row][node], self.assigned.policy(row, node)
            if not fixed or policy.highest <= 1:
                continue
            if self.nodes.at(row, node).solved is None:  # P is not known here yet, so no bound is
                path.low[place], path.high[place] = 0.0, math.inf
            elif token in fixed:  # here the selection law, and so h, may exceed p
                most = policy.highest * q_n[place]
                path.high[place] = most / p_n[place] if p_n[place] > 0 else math.inf

    def accepted_and_last(self) -> tuple[Int[Tensor, "paths"], Int[Tensor, "paths"]]:
        """Return the number of accepted tokens of each path, and the token after them."""
        accepted = np.array([path.accepted for path in self.paths], np.int64)
        last = np.array([path.last for path in self.paths], np.int64)
        return from_numpy(accepted), from_numpy(last)


def chains(draft: Draft, accept: Tensor, draw: Tensor) -> tuple[list[Path], Index]:
    """Return each text's drafted chain as a path, and indices (text, node, id) of the tokens."""
    batch, width = draft.token_ids.shape
    ids, draws, coins = draft.ids, as_list(draw), as_list(accept)
    paths = [
        Path(row, range(count + 1), draws[row], ids[row][:count], coins[row])
        for row, count in enumerate(draft.lengths)
    ]
    return paths, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


class Descent:
    """The walk down one text's tree: runs of sampled tokens, joined by deterministic tokens.

    ``above`` has the node that each drafted token follows. ``node`` is the node reached so far.
    """

    def __init__(self, draft: Draft, row: int, coins: Any, draws: Any) -> None:
        self.draft, self.row, self.above = draft, row, draft.above[row]
        self.ids = draft.ids[row]
        self.coins, self.draws = coins, draws
        # the first sampled token after each node; a second one, of another place, is refused below
        self.sampled_child = draft.first_after[row]
        assert draft.sampled is not None
        for place, node in compress(enumerate(self.above), as_list(draft.sampled[row])):
            if self.sampled_child[node] != place:
                raise ValueError(
                    "sampled: at most one token may be sampled after a node; got tokens "
                    f"{self.sampled_child[node]} and {place} of row {row}"
                )
        self.runs: list[Path] = []
        self.node = 0

    def nodes(self) -> list[Node]:
        """Return the nodes where the text's tokens were emitted, in order."""
        return [node for run in self.runs for node in run.nodes()]

    def accepted(self) -> list[int]:
        """Return the places of the accepted tokens, in order."""
        reached = [node for run in self.runs for node in run.node_numbers[: run.accepted + 1]]
        return [node - 1 for node in reached[1:]]  # token i leads to node i + 1

    def run(self) -> Path:
        """Return the path of sampled tokens from the current node on."""
        places, node = list[int](), self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]  # token i leads to node i + 1
        ids, coins = ([row[place] for place in places] for row in (self.ids, self.coins))
        self.runs.append(Path(self.row, nodes, self.draws[len(self.runs)], ids, coins))
        return self.runs[-1]

    def goes_on(self) -> bool:
        """Move to the drafted child that was drawn after the run; return whether there is one."""
        run = self.runs[-1]
        end = run.node_numbers[run.accepted]
        pairs = zip(self.above, self.ids, strict=False)  # each token's parent node, and its id
        drafted = [place for place, pair in enumerate(pairs) if pair == (end, run.last)]
        # only rounding can draw a rejected token again; the tokens below it are biased, so stop
        if not drafted or drafted[0] == self.sampled_child.get(end):
            return False
        self.node = drafted[0] + 1
        return True


def index_of(paths: Sequence[Path]) -> Index:
    """Return indices (text, node, id) of paths' tokens; arbitrary after a path's last token."""
    nodes, ids = np.zeros((2, len(paths), max(path.count for path in paths)), dtype=np.int64)
    for number, path in enumerate(paths):
        nodes[number, : path.count] = path.node_numbers[:-1]
        ids[number, : path.count] = path.ids
    return np.array([[path.row] for path in paths]), nodes, ids


def _entries(rows: np.ndarray | Tensor, index: Index) -> Float[np.ndarray, "paths K"]:
    entries = rows[index]
    if isinstance(entries, np.ndarray):
        return entries.astype(np.float64, copy=False)
    return entries.double().numpy()
