"""Trees on a CPU: the runs of sampled tokens of all rows that walk on are judged together.

A run is judged as a path is (:mod:`cactus_theory.verify._block_host`). What certain tokens change
at a node is how far these are raised: one number, so that no selection law is written out where
the policy answers rows.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies import Policy
from cactus_theory.policies._records import Node
from cactus_theory.verify._block_host import BlockOnHost
from cactus_theory.verify._host import Place, Places
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one


class Descent:
    """The walk down one row's tree.

    The drafted tokens follow the nodes ``above``, their h_n are ``raised`` (NaN where unknown, None
    where no policy looks ahead), and ``run`` are the nodes from where the walk is along sampled
    children. ``path`` holds the places of the accepted tokens in order, ``charged`` the nodes where
    a token was emitted that anything was drafted after, in order, with the alive ratio there, and
    ``last`` the token that ends the round, so far; ``draws_taken`` were drawn.
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
        self.raised: list[float] | None = None
        self.path: list[int] = []
        self.charged: dict[int, float] = {}
        self.last, self.draws_taken = NO_TOKEN, 0
        self.run = self._run(0)

    @cached_property
    def certain_ids(self) -> list[list[int]]:
        """Return the ids of the certain tokens after each node."""
        return self.draft.fixed(self.row)

    @cached_property
    def tokens_left(self) -> list[int]:
        """Return how many tokens were planned below what follows each node."""
        return self.draft.left(self.row)

    def _run(self, node: int) -> list[int]:
        run = [node]
        while (place := self.sampled_child.get(run[-1])) is not None:
            run.append(place + 1)
        return run

    def look_ahead(self, assigned: Assignment, q: Float[Tensor, "K1 vocab"]) -> None:
        """Set h_n of certain tokens beside which none was sampled, where a policy looks ahead."""
        certain, choice = self.draft.flags[self.row][1], assigned.choice
        certain_places = [
            [] if node in self.sampled_child else [place for place in places if certain[place]]
            for node, places in enumerate(self.draft.children(self.row))
        ]
        if not any(certain_places):
            return
        self.raised = [math.nan] * len(self.ids)
        q_n = q[list(self.above), self.ids[: len(self.above)]].double().tolist()
        for number, policy in enumerate(assigned.policies):
            raised = policy.certain_tree(q_n, certain_places)
            for node, places in enumerate(certain_places if raised is not None else ()):
                if places and (choice is None or int(choice[self.row, node]) == number):
                    for place in places:
                        self.raised[place] = raised[place]  # type: ignore[index]

    def go_on(self, accepted: int, token: int, alive: Sequence[float]) -> bool:
        """Take what came of the run; return whether the token drawn after it is a child.

        ``alive`` are the ratios of the run's nodes.
        """
        taken = self.run[: accepted + 1]
        end = taken[-1]
        self.charged |= zip(taken if end in self.above else taken[:-1], alive, strict=False)
        self.path += [node - 1 for node in taken[1:]]
        self.last, self.draws_taken = token, self.draws_taken + 1
        if token not in self.ids:
            return False
        children = zip(self.above, self.ids, strict=False)
        caught = [place for place, child in enumerate(children) if child == (end, token)]
        # what was refused does not come back but by rounding, and what is below it is biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.path += caught
        self.run = self._run(caught[0] + 1)
        return True

    def go_freely(
        self, q: Float[Tensor, "batch K1 vocab"], draw: Sequence[Sequence[float]]
    ) -> bool:
        """Draw from q where nothing was drafted by a law; return whether the walk goes on."""
        while len(self.run) == 1 and not self.certain_ids[self.run[0]]:
            token = pick_one(q[self.row, self.run[0]], draw[self.row][self.draws_taken])
            if not self.go_on(0, token, [1.0]):
                return False
        return True


class RunsOnHost(BlockOnHost):
    """One verification of a run of each of some rows, as a block.

    The places of a run are its nodes; ``q`` and ``p`` are the rows of all nodes.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "batch K1 vocab"],
        p: Float[Tensor, "batch K vocab"],
        walks: Sequence[Descent],
        accept: list[list[float]],
        draw: list[list[float]],
    ) -> None:
        self.assigned, self.walks = assigned, walks
        self.levels: dict[Place, float] = {}  # P h/q of certain tokens, with the residual's scale
        counts = [len(walk.run) - 1 for walk in walks]
        nodes, ids = np.zeros((2, len(walks), max(counts)), dtype=np.int64)
        for number, (walk, size) in enumerate(zip(walks, counts, strict=True)):
            nodes[number, :size] = walk.run[:-1]
            ids[number, :size] = [walk.ids[node - 1] for node in walk.run[1:]]
        self.nodes = np.array([[walk.row] for walk in walks]), nodes
        self._index = *self.nodes, ids
        coins = [[accept[walk.row][node - 1] for node in walk.run[1:]] for walk in walks]
        draws = [draw[walk.row][walk.draws_taken] for walk in walks]
        super().__init__(assigned, q, p, Draft(torch.from_numpy(ids), counts, None), coins, draws)
        # where certain tokens matter: not to h = q
        raises = any(policy.highest > 1 for policy in assigned.policies)
        self.certain = {
            (number, place): fixed
            for number, walk in enumerate(walks if raises else ())
            for place, node in enumerate(walk.run)
            if (fixed := walk.certain_ids[node]) and self._policy((number, place)).highest > 1
        }
        # where h is computed from the selection law
        self.dense = {place for place in self.certain if not self._policy(place).answers_rows}
        for place in self.certain:
            if place[1] < self.lengths[place[0]]:
                self._widen(*place)

    def _row_index(self, place: Place) -> Place:
        walk = self.walks[place[0]]
        return walk.row, walk.run[place[1]]

    def _choice(self) -> Int[Tensor, "batch K"] | None:
        choice = self.assigned.choice
        return None if choice is None else choice[self.nodes]

    def _widen(self, row: int, index: int) -> None:
        """Let the bounds of a drafted token hold beside certain ones, or as one of them."""
        low, high = self.low[row], self.high[row]
        if (row, index) in self.dense:
            low[index], high[index] = 0.0, math.inf
        elif self._is_joint((row, index)):
            q_n, p_n = (entries[row][index] for entries in self.entries)
            high[index] = self._policy((row, index)).highest * q_n / p_n if p_n > 0 else math.inf

    def _policy(self, place: Place) -> Policy:
        choice = self.assigned.choice
        return self.assigned.policies[0 if choice is None else int(choice[self._row_index(place)])]

    def _is_joint(self, place: Place) -> bool:
        """Return whether the drafted token is certain, too."""
        walk = self.walks[place[0]]
        return walk.ids[walk.run[place[1] + 1] - 1] in self.certain[place]

    def _tokens_left(self, place: Place) -> int:
        matters = self._policy(place).needs_path
        return self.walks[place[0]].tokens_left[self._row_index(place)[1]] if matters else 0

    def _follow(self, places: Sequence[Place], ends: bool = False) -> None:
        super()._follow([place for place in places if place not in self.certain], ends)
        for place in places:
            if place in self.dense:
                r = check.normalised(torch.from_numpy(self.rows[1][self._row_index(place)]))
                n = self.ids[place]
                mass = self.alive[place[0]][place[1]] * self._h(place)
                self.ratios[place] = float((mass[n] / r[n]).nan_to_num(nan=0.0))
                self.residuals[place] = mass - r
            elif place in self.certain:
                node = self._node(place, ends, self.certain[place], self._is_joint(place))
                self.ratios[place], scale, level = _follow_beside(self._policy(place), node)
                if scale is not None and level is not None:
                    self.residuals[place], self.levels[place] = scale, level

    def _h(self, place: Place) -> Float[Tensor, "vocab"]:
        """Return h at a place from its selection law."""
        row, node = self._row_index(place)
        q = self.q[row, node : node + 1]
        law = self.walks[place[0]].draft.offers(row, [node], q)
        path = self._path(Places([place]))
        target = self._policy(place).target_in_block(check.normalised(q), law, path)
        assert target is not None  # check() has seen the policy
        return target[0].double()

    def _residual(self, places: Places, scale: float | None = None) -> Float[Tensor, "rows vocab"]:
        out = super()._residual(places, scale)
        for row, place in zip(out.numpy(), places.places, strict=True) if self.certain else ():
            if place not in self.certain or place in self.dense:
                continue
            q, p = (rows[self._row_index(place)] for rows in self.rows)
            fixed = self.certain[place]
            level = self.levels.get(place, 0.0)
            if scale is not None:  # what certain tokens may have at most
                inside = math.fsum(q[fixed].tolist())
                level = scale * min(self._policy(place).highest, 1 / (inside or 1.0))
            row[fixed] = np.maximum(level * q[fixed] - p[fixed], 0.0)
        return out

    def _bonus_row(self, place: Place) -> Float[Tensor, "vocab"]:
        """Return h where nothing was sampled, up to a factor."""
        q = self.q[self._row_index(place)]
        if place not in self.certain or place[0] in self.cuts:
            return q
        (_, node), fixed = self._row_index(place), self.certain[place]
        walk, policy = self.walks[place[0]], self._policy(place)
        places = zip(walk.above, walk.ids, walk.raised or (), strict=False)
        ahead = {token: h_n for above, token, h_n in places if above == node and h_n > 0}
        if ahead:  # the others in proportion to q
            law = q.index_fill(0, torch.tensor([*ahead]), 0.0)
            rest = float(law.sum(dtype=torch.float64))
            law *= (1 - math.fsum(ahead.values())) / rest if rest > 0 else 0.0
            law[[*ahead]] = law.new_tensor([*ahead.values()])
            return law
        if place in self.dense:
            return self._h(place)
        none, alive = np.zeros_like(q.numpy()), self.alive[place[0]][place[1]]
        beside = Node(q.numpy(), none, 0.0, 0.0, alive, self._tokens_left(place), True, fixed)
        _, scale, level = _follow_beside(policy, beside)
        assert scale is not None and level is not None  # the path ends there
        law = q * scale
        law[fixed] = q[fixed] * level
        return law


def _follow_beside(policy: Policy, node: Node) -> tuple[float, float | None, float | None]:
    answer = policy.follow_row(node)
    if len(answer) != 3:
        raise TypeError(
            f"rule: follow_row of {policy.spec} must return three values where tokens are certain; "
            f"got {len(answer)}"
        )
    return answer


class TokensOnHost(RunsOnHost):
    """The same token by token: each is kept with a coin of its own."""

    def judge(self) -> None:
        """Find how many tokens of each run are accepted, and the token after them."""
        for row, drafted in enumerate(self.lengths):
            self.alive[row] = [1.0] * (drafted + 1)
            place = 0
            while place < drafted and self._keeps((row, place)):
                place += 1
            self.accepted[row] = place
            if row in self.cuts and place == drafted:
                self.last[row] = NO_TOKEN
            elif place == drafted:
                self._draw(row, self._bonus_row((row, place)))

    def _keeps(self, place: Place) -> bool:
        """Return whether the token at a place is kept; if not, draw the one that replaces it."""
        places, coin = self._places([place]), self.coins[place[0]][place[1]]
        if place in self.certain:
            self._follow([place])
            kept = coin < self.ratios[place]
            if not kept:
                self._follow([] if place in self.residuals else [place], ends=True)
                self._settle(places)
            return kept
        assert self.p is not None
        rows = places.of(self.q), places.of(self.p), self.ids[place][None]
        decision = self._policy(place).decide(*rows, torch.tensor([coin], dtype=torch.float64))
        if bool(decision.kept) or decision.residual is None:
            return True
        self._draw(place[0], decision.residual.law(*rows)[0])
        return False
