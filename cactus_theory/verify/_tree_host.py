"""Trees on a CPU: the runs of sampled tokens of all rows that walk on are judged together.

A run is judged as a path is (:mod:`cactus_theory.verify._block_host`). What certain tokens change
at a node is how far these are raised: one number, so that no selection law is written out where
the policy answers rows.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.optimum.selection import offered
from cactus_theory.policies import Policy
from cactus_theory.policies._path import Node
from cactus_theory.verify._block_host import BlockOnHost
from cactus_theory.verify._host import Place, Places
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one


class Steps:
    """The walk down one row's tree.

    Attributes
    ----------
    next, fixed, left : of each node, its sampled child or None, the certain tokens after it, and
        how many tokens were planned below what follows it.
    run : the nodes from where the walk is along sampled children.
    path, charged : places of the accepted tokens, and the nodes where a token was emitted that
        anything was drafted after, in order.
    alive : the alive ratio at each charged node.
    last : the token that ends the round, so far.
    """

    def __init__(self, draft: Draft, row: int, ids: list[int]) -> None:
        assert draft.sampled is not None
        self.row, self.ids, self.children = row, ids, draft.children(row)
        self.fixed, self.left = draft.fixed(row), draft.left(row)
        self.next: list[int | None] = [None] * len(self.children)
        self.above, flags = draft.above[row], draft.sampled[row].tolist()
        for place, node in enumerate(self.above):
            if not flags[place]:
                continue
            if self.next[node] is not None:
                raise ValueError(
                    "draft: at most one token may be sampled after a node; got "
                    f"{[self.next[node], place]} in row {row}"
                )
            self.next[node] = place
        self.raised: list[float] | None = None  # h_n of the drafted tokens, NaN where unknown
        self.path: list[int] = []
        self.charged: list[int] = []
        self.alive: list[float] = []
        self.last, self.drawn = NO_TOKEN, 0
        self.run = self._run(0)

    def _run(self, node: int) -> list[int]:
        run = [node]
        while (place := self.next[run[-1]]) is not None:
            run.append(place + 1)
        return run

    def look_ahead(self, assigned: Assignment, q: Float[Tensor, "K1 vocab"]) -> None:
        """Set h_n of certain tokens beside which none was sampled, where a policy looks ahead."""
        sure = [
            [] if follows is not None else [place for place in own if self.ids[place] in fixed]
            for own, fixed, follows in zip(self.children, self.fixed, self.next, strict=True)
        ]
        if not any(sure):
            return
        self.raised = [math.nan] * len(self.ids)
        q_n = q[list(self.above), self.ids[: len(self.above)]].double().tolist()
        for number, policy in enumerate(assigned.policies):
            own = type(policy).certain_tree is not Policy.certain_tree
            found = policy.certain_tree(q_n, sure) if own else None
            for place, node in enumerate(self.above if found is not None else ()):
                choice = assigned.choice
                mine = choice is None or int(choice[self.row, node]) == number
                if mine and place in sure[node]:
                    self.raised[place] = found[place]  # type: ignore[index]

    def go_on(self, accepted: int, drawn: int, alive: Sequence[float]) -> bool:
        """Take what came of the run; return whether the token drawn after it is a child."""
        taken = self.run[: accepted + 1]
        for node, own in zip(taken, alive, strict=False):
            if self.children[node]:
                self.charged.append(node)
                self.alive.append(own)
        self.path += [node - 1 for node in taken[1:]]
        self.last, self.drawn = drawn, self.drawn + 1
        node = taken[-1]
        caught = [place for place in self.children[node] if self.ids[place] == drawn]
        # what was refused does not come back but by rounding, and what is below it is biased
        if not caught or caught[0] == self.next[node]:
            return False
        self.path.append(caught[0])
        self.run = self._run(caught[0] + 1)
        return True

    def go_freely(
        self, q: Float[Tensor, "batch K1 vocab"], draw: Sequence[Sequence[float]]
    ) -> bool:
        """Draw from q where nothing was drafted by a law; return whether the walk goes on."""
        while len(self.run) == 1 and not self.fixed[self.run[0]]:
            token = pick_one(q[self.row, self.run[0]], draw[self.row][self.drawn])
            if not self.go_on(0, token, [1.0]):
                return False
        return True


class RunsOnHost(BlockOnHost):
    """One verification of a run of each of some rows, as a block.

    The places of a run are its nodes, where ``q``, ``p`` and ``ids`` are those of all nodes.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        p: Float[Tensor, "batch K vocab"],
        walks: Sequence[Steps],
        accept: list[list[float]],
        draw: list[list[float]],
    ) -> None:
        self.walks, counts = walks, [len(walk.run) - 1 for walk in walks]
        self.where = {
            (number, place): (walk.row, node)
            for number, walk in enumerate(walks)
            for place, node in enumerate(walk.run)
        }
        self.certain = {
            place: walks[place[0]].fixed[node]
            for place, (_, node) in self.where.items()
            if walks[place[0]].fixed[node]
        }
        shape = len(walks), max(counts)
        nodes, coins = np.zeros(shape, dtype=np.int64), np.ones(shape)
        tokens = np.zeros(q.shape[:2], dtype=np.int64)  # by node, of its sampled child
        for number, walk in enumerate(walks):
            for place, (node, following) in enumerate(pairwise(walk.run)):
                nodes[number, place], tokens[walk.row, node] = node, walk.ids[following - 1]
                coins[number, place] = accept[walk.row][following - 1]
        self.nodes = np.array([[walk.row] for walk in walks]), nodes
        last = torch.tensor([draw[walk.row][walk.drawn] for walk in walks], dtype=torch.float64)
        self.levels: dict[Place, float] = {}  # P h/q of certain tokens, with the residual's scale
        super().__init__(
            assigned, q, Draft(torch.from_numpy(tokens), counts, p), torch.from_numpy(coins), last
        )
        self.dense: set[Place] = set()  # where h is computed from the selection law
        for number, own in self._by_policy([*self.certain]):
            self._widen(assigned.policies[number], own)

    def _entries(self, rows: Float[Tensor, "texts nodes vocab"]) -> Float[np.ndarray, "batch K"]:
        found = rows.detach().numpy()[(*self.nodes, self.ids.numpy()[self.nodes])]
        return found.astype(np.float64, copy=False)

    def _choice(self) -> Int[Tensor, "batch K"] | None:
        choice = self.assigned.choice
        return None if choice is None else choice[self.nodes]

    def _widen(self, policy: Policy, places: Sequence[Place]) -> None:
        """Let the bounds of drafted tokens hold beside certain ones, or as one of them."""
        for place in places:
            number, own = place
            if not policy.answers_beside:
                self.dense.add(place)
            if own >= self.drafted[number]:
                continue
            low, high = self.low[number], self.high[number]
            if place in self.dense:
                low[own], high[own] = 0.0, math.inf
            elif self._joint(place):
                q_n, p_n = (entries[number][own] for entries in self.entries)
                high[own] = policy.highest * q_n / p_n if p_n > 0 else math.inf

    def _policy(self, place: Place) -> Policy:
        choice = self.assigned.choice
        return self.assigned.policies[0 if choice is None else int(choice[self._at(place)])]

    def _joint(self, place: Place) -> bool:
        """Return whether the drafted token is certain, too."""
        walk = self.walks[place[0]]
        return walk.ids[walk.run[place[1] + 1] - 1] in self.certain[place]

    def _left(self, place: Place) -> int:
        return self.walks[place[0]].left[self._at(place)[1]]

    def _follow(self, asked: Sequence[Place], ends: bool = False) -> None:
        super()._follow([place for place in asked if place not in self.certain], ends)
        for place in asked:
            if place in self.dense:
                r = check.normalised(torch.from_numpy(self.rows[1][self._at(place)]))
                n = self.ids[self._at(place)]
                mass = self.alive[place[0]][place[1]] * self._h(place, r)
                self.ratios[place] = float((mass[n] / r[n]).nan_to_num(nan=0.0))
                self.residuals[place] = mass - r
            elif place in self.certain:
                node = self._node(place, ends, self.certain[place], self._joint(place))
                self.ratios[place], scale, level = self._policy(place).follow_beside(node)
                if scale is not None and level is not None:
                    self.residuals[place], self.levels[place] = scale, level

    def _h(self, place: Place, r: Float[Tensor, "vocab"] | None) -> Float[Tensor, "vocab"]:
        """Return h at a place from its selection law, r the row that was sampled from there."""
        q = check.normalised(self.q[self._at(place)])
        sampled = None if r is None else r.numpy()
        law = torch.from_numpy(offered(q.numpy(), sampled, self.certain[place]))
        path = self._path(Places([place]))
        found = self._policy(place).target_in_block(q[None], law[None], path)
        assert found is not None  # check() has seen the policy
        return found[0].double()

    def _may_end(self, row: int, place: int) -> bool:
        return (row, place) in self.dense or super()._may_end(row, place)

    def _residual(self, places: Places, scale: float | None = None) -> Float[Tensor, "rows vocab"]:
        out = super()._residual(places, scale)
        for own, place in zip(out.numpy(), places.places, strict=True):
            if place not in self.certain or (scale is None and place in self.dense):
                continue
            level, fixed, at = self.levels.get(place), self.certain[place], self._at(place)
            if scale is None and level == self.residuals[place]:
                continue
            q, p = self.rows[0][at], self.rows[1][at]
            if scale is not None:  # what certain tokens may have at most
                inside = math.fsum(q[fixed].tolist())
                level = scale * min(self._policy(place).highest, 1 / (inside or 1.0))
            for token in fixed:
                own[token] = max(level * q[token] - p[token], 0.0) if q[token] > 0 else 0.0
        return out

    def _bonus_row(self, place: Place) -> Float[Tensor, "vocab"]:
        """Return h where nothing was sampled, up to a factor."""
        q = self.q[self._at(place)]
        if place not in self.certain or place[0] in self.lost:
            return q
        fixed = self.certain[place]
        walk, (_, node), policy = self.walks[place[0]], self._at(place), self._policy(place)
        values = walk.raised or [0.0] * len(walk.ids)
        raised = {walk.ids[own]: values[own] for own in walk.children[node]}
        ahead = [token for token in fixed if raised[token] > 0]  # not NaN
        if ahead:  # the others in proportion to q
            law = q.index_fill(0, torch.tensor(ahead), 0.0)
            values = [raised[token] for token in ahead]
            rest = float(law.sum(dtype=torch.float64))
            law *= (1 - math.fsum(values)) / rest if rest > 0 else 0.0
            law[ahead] = law.new_tensor(values)
            return law
        if place in self.dense:
            return self._h(place, None)
        none, alive = np.zeros_like(q.numpy()), self.alive[place[0]][place[1]]
        node = Node(q.numpy(), none, 0.0, 0.0, alive, self._left(place), True, fixed)
        _, scale, level = policy.follow_beside(node)
        assert scale is not None and level is not None  # the path ends there
        law = q * scale
        law[fixed] = torch.where(q[fixed] > 0, q[fixed] * level, 0.0)
        return law


class TokensOnHost(RunsOnHost):
    """The same token by token: each is kept with a coin of its own."""

    def judge(self) -> None:
        """Find how many tokens of each run are accepted, and the token after them."""
        for row, drafted in enumerate(self.drafted):
            self.alive[row] = [1.0] * (drafted + 1)
            place = 0
            while place < drafted and self._keeps((row, place)):
                place += 1
            self.accepted[row] = place
            if row in self.lost and place == drafted:
                self.drawn[row] = NO_TOKEN
            elif place == drafted:
                self._draw(row, self._bonus_row((row, place)))

    def _keeps(self, place: Place) -> bool:
        """Return whether the token at a place is kept; if not, draw the one that replaces it."""
        at, coin = Places([place], self.where), self.coins[place[0]][place[1]]
        if place in self.certain:
            self._follow([place])
            kept = coin < self.ratios[place]
            if not kept:
                self._follow([own for own in [place] if own not in self.residuals], ends=True)
                self._settle(at)
            return kept
        assert self.p is not None
        rows = at.of(self.q), at.of(self.p), at.of(self.ids)
        decision = self._policy(place).decide(*rows, torch.tensor([coin], dtype=torch.float64))
        if bool(decision.kept) or decision.residual is None:
            return True
        self._draw(place[0], decision.residual.law(*rows)[0])
        return False
