"""The walk along drafted paths on a CPU: where a coin ends it, forwards, backwards, down a tree.

Drafted entries answer most coins (:meth:`Policy.bounds`); where they do not, the node there is
asked (:class:`~cactus_theory.verify.node.Node`). A chain asks forwards up to the first coin that
does not pass; a block follows the alive ratio P forwards, and looks backwards for the last coin
that passes. In a tree a path is a run of sampled tokens; the token drawn at its end may be a
deterministic child, and the walk goes on from it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cactus_theory.base.tolerances import DECIDED, ROW_SUM_TOLERANCE
from cactus_theory.policies import Entrywise, Policy
from cactus_theory.verify._dense import raised_entries
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN
from cactus_theory.verify.node import Node, Residual, ask_recovered, ask_together

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
    q_n: list[float]  # entries at the tokens
    p_n: list[float]
    low: list[float]  # bounds on h_n/p_n, or φ
    high: list[float]
    raised: list[float] | None = None  # h_n of tokens whose policy looked ahead, else NaN

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
            self.made[place] = self.walk.node(self, place)
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
        residual = node.residual()
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


class Walk:
    """The rows of a round of drafted paths, and their nodes.

    Of trees p is given, and not read where nothing is sampled. Rows are kept in one precision,
    float32 for half precision.
    """

    def __init__(
        self, verifier: Any, assigned: Assignment, q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None, draft: Draft, paths: Sequence[Path],
        index: Index,
    ) -> None:  # fmt: skip
        if p is not None and p.dtype != q.dtype:
            dtype = torch.promote_types(q.dtype, p.dtype)
            q, p = q.to(dtype), p.to(dtype)
        self.verifier, self.assigned, self.draft, self.paths = verifier, assigned, draft, paths
        self.tensors, self.index = (q, p), index
        self.choice = None if assigned.choice is None else assigned.choice.tolist()
        self.q, self.p = _readable(q), None if p is None else _readable(p)
        q_n = _entries(self.q, index)
        p_n = np.ones_like(q_n) if self.p is None else _entries(self.p, index)
        self.q_n, self.p_n = torch.from_numpy(q_n), torch.from_numpy(p_n)
        for path, *entries in zip(paths, q_n.tolist(), p_n.tolist(), strict=True):
            path.walk, path.q_n, path.p_n = self, *entries
        if math.isnan(np.vdot(q_n, p_n)):
            for path, lawless in zip(paths, np.isnan(q_n + p_n), strict=True):
                if lawless[: path.count].any():
                    path.count, path.cut = int(lawless.argmax()), True

    def policy(self, path: Path, place: int) -> Policy:
        """Return the policy that judges what follows a place of a path."""
        return self.assigned.policies[self.number(path, place)]

    def number(self, path: Path, place: int) -> int:
        """Return the number of that policy."""
        if self.choice is None:
            return 0
        chosen = self.choice[path.row]
        return chosen[min(path.places[place], len(chosen) - 1)]

    def chosen(self, by_policy: Sequence[Tensor]) -> Shaped[Tensor, "paths K"]:
        """Return each token's entry by the policy that judges it, from entries by policy."""
        if self.assigned.choice is None:
            return by_policy[0]
        choice = self.assigned.choice[self.index[:2]][None]
        return torch.stack(list(by_policy)).gather(0, choice)[0]

    def node(self, path: Path, place: int) -> Node:
        """Return a node of a path: the one that its policy was chosen by, if there is one."""
        row, at = path.row, path.places[place]
        if self.assigned.nodes is not None and (row, at) in self.assigned.nodes:
            return self.assigned.nodes[row, at]
        q, p, token, fixed = _row(self.q, row, at), None, None, ()
        if place < len(path.ids):
            token = path.ids[place]
            p = None if self.p is None else _row(self.p, row, at)
        if self.draft.sampled is not None:
            fixed = self.draft.fixed[row][at]
        alive = path.alive[place] if self.verifier.by_path and place < len(path.alive) else 1.0
        raised = math.nan if path.raised is None or token is None else path.raised[place]
        policy = self.policy(path, place)
        return Node(self.verifier, policy, q, p, token, alive, raised, fixed)

    def forwards(self) -> None:
        """Accept token by token, up to the first coin that is not below φ."""
        bounds = [self._least(policy) for policy in self.assigned.policies]
        exact = [on for _, on in bounds]
        low = self.chosen([least for least, _ in bounds]).tolist()
        waiting = list(self.paths)
        for path, own in zip(self.paths, low, strict=True):
            path.low = own
        while waiting:
            open_paths = []
            for path in waiting:
                place, coins, low = path.accepted, path.coins, path.low
                while place < path.count and coins[place] < low[place]:
                    place += 1
                path.accepted = place
                if place < path.count and not exact[self.number(path, place)]:
                    open_paths.append(path)
            nodes = [path.node(path.accepted) for path in open_paths]
            ask_together(nodes)
            asked = zip(open_paths, nodes, strict=True)
            waiting = [path for path, node in asked if node.exceeds(path.coins[path.accepted])]
            for path in waiting:
                path.accepted += 1
        ends = [path.node(path.accepted) for path in self.paths if not path.is_undecided]
        ask_recovered(node for node in ends if node.token is not None and node.accepts_by_phi)
        for path in self.paths:
            path.end()

    def _least(self, policy: Policy) -> tuple[Float[Tensor, "paths K"], bool]:
        """Return the least φ of each drafted token by its entries, and whether this is φ."""
        low, high = policy.bounds(self.q_n, self.p_n)
        if low is high or isinstance(policy, Entrywise):
            return low, True
        # a row's sum may miss 1 and move a bound as far: close calls are the policy's
        return low * (1 - 2 * ROW_SUM_TOLERANCE[self.tensors[0].dtype]), False

    def backwards(self) -> None:
        """Follow P forwards as far as a later coin could still pass; end at the last that does.

        P = 1 always passes and a coin above P never, so few residuals are summed.
        """
        raised = None
        if self.p is None:
            draft = replace(self.draft, counts=[path.count for path in self.paths])
            raised = raised_entries(self.assigned, self.tensors[0], draft)
        bounds = [policy.bounds(self.q_n, self.p_n) for policy in self.assigned.policies]
        low, high = map(self.chosen, zip(*bounds, strict=True))
        if raised is not None:
            low, high = (torch.where(raised.isnan(), own, raised) for own in (low, high))
            for path, own in zip(self.paths, raised.tolist(), strict=True):
                path.raised = own
        for path, *own in zip(self.paths, low.tolist(), high.tolist(), strict=True):
            path.low, path.high = own
            if self.draft.sampled is not None:
                self._widen(path)
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

    def _widen(self, path: Path) -> None:
        """Widen a drafted token's bounds where it, or a token beside it, is deterministic.

        There a band has the bounds of tokens that are sampled alone.
        """
        for place, token in enumerate(path.ids):
            fixed, policy = self.draft.fixed[path.row][path.places[place]], self.policy(path, place)
            if not fixed or policy.highest <= 1:
                continue
            q_n, p_n = path.q_n[place], path.p_n[place]
            if self.node(path, place).solved is None:  # P is not known yet
                path.low[place], path.high[place] = 0.0, math.inf
            elif token in fixed:
                path.high[place] = policy.highest * q_n / p_n if p_n > 0 else math.inf

    def accepted_and_last(self) -> tuple[Int[Tensor, "paths"], Int[Tensor, "paths"]]:
        """Return the accepted count of each path and the token after it."""
        accepted = np.array([path.accepted for path in self.paths], np.int64)
        last = np.array([path.last for path in self.paths], np.int64)
        return torch.from_numpy(accepted), torch.from_numpy(last)


def chains(draft: Draft, accept: Tensor, draw: Tensor) -> tuple[list[Path], Index]:
    """Return each text's drafted chain as a path, with the indices of its tokens."""
    batch, width = draft.token_ids.shape
    ids, draws, coins = (part.tolist() for part in (draft.token_ids, draw, accept))
    paths = [
        Path(row, range(count + 1), draws[row], ids[row][:count], coins[row])
        for row, count in enumerate(draft.lengths)
    ]
    return paths, (np.arange(batch)[:, None], np.arange(width), draft.token_ids.numpy())


class Descent:
    """The walk down one row's tree: paths of sampled tokens, joined by deterministic ones.

    The drafted tokens follow the nodes ``above``. The walk is at ``node``. ``path`` holds the
    places of the accepted tokens in order, ``last`` the token that ends the round, so far.
    """

    def __init__(self, draft: Draft, row: int, coins: Any, draws: Any) -> None:
        self.draft, self.row, self.above = draft, row, draft.above[row]
        self.ids = draft.token_ids[row].tolist()
        self.coins, self.draws = coins, draws
        sampled = [*compress(enumerate(self.above), draft.flags[row][0])]
        self.sampled_child = {node: place for place, node in sampled}
        for place, node in sampled:
            if self.sampled_child[node] != place:
                raise ValueError(
                    "sampled: at most one token may be sampled after a node; got tokens "
                    f"{place} and {self.sampled_child[node]} of row {row}"
                )
        self.path: list[int] = []
        self.runs: list[Path] = []
        self.node, self.last = 0, NO_TOKEN

    def nodes(self) -> list[Node]:
        """Return the nodes that the tokens were emitted at, in order."""
        return [node for run in self.runs for node in run.nodes()]

    def run(self) -> Path:
        """Return the path of sampled tokens from the current node on."""
        places, node = [], self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]
        ids, coins = [self.ids[place] for place in places], [self.coins[place] for place in places]
        self.runs.append(Path(self.row, nodes, self.draws[len(self.runs)], ids, coins))
        return self.runs[-1]

    def goes_on(self) -> bool:
        """Move past the judged path; return whether the token drawn after it is a drafted child."""
        run = self.runs[-1]
        taken = run.places[: run.accepted + 1]
        end = taken[-1]
        self.path += [node - 1 for node in taken[1:]]
        self.last = run.last
        children = zip(self.above, self.ids, strict=False)
        caught = [place for place, child in enumerate(children) if child == (end, run.last)]
        # a rejected token is drawn again only by rounding, and the tokens below it are biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.path += caught
        self.node = caught[0] + 1
        return True


def index_of(paths: Sequence[Path]) -> Index:
    """Return the indices of the tokens of paths; those beyond a path's last one are arbitrary."""
    nodes, ids = np.zeros((2, len(paths), max(path.count for path in paths)), dtype=np.int64)
    for number, path in enumerate(paths):
        nodes[number, : path.count] = path.places[:-1]
        ids[number, : path.count] = path.ids
    return np.array([[path.row] for path in paths]), nodes, ids


def _readable(rows: Tensor) -> np.ndarray | Tensor:
    """Return rows as numpy's, where it has their precision."""
    return rows.detach().numpy() if rows.dtype in DECIDED else rows.detach()


def _row(rows: np.ndarray | Tensor, text: int, node: int) -> np.ndarray:
    row = rows[text, node]
    return row if isinstance(row, np.ndarray) else row.float().numpy()


def _entries(rows: np.ndarray | Tensor, index: Index) -> Float[np.ndarray, "paths K"]:
    if isinstance(rows, np.ndarray):
        return rows[index].astype(np.float64, copy=False)
    return rows[tuple(map(torch.from_numpy, index))].double().numpy()
