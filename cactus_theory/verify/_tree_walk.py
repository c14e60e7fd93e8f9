"""The walk down one text's tree, from one run of sampled tokens to the next."""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import compress

from jaxtyping import Float
from torch import Tensor

from cactus_theory.verify._runs import Run
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one


class Descent:
    """The walk down one row's tree.

    The drafted tokens follow the nodes ``above``, their h_n are ``raised`` (NaN where unknown, None
    where no policy looks ahead). The walk is at ``node``. ``path`` holds the places of the accepted
    tokens in order, ``charged`` the nodes where a token was emitted that anything was drafted
    after, in order, with the alive ratio there, and ``last`` the token that ends the round, so far;
    ``draws_taken`` were drawn.
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
        self.node, self.last, self.draws_taken = 0, NO_TOKEN, 0

    @cached_property
    def deterministic_ids(self) -> list[list[int]]:
        """Return the ids of the deterministic tokens after each node."""
        return self.draft.fixed(self.row)

    def look_ahead(self, assigned: Assignment, q: Float[Tensor, "K1 vocab"]) -> None:
        """Set h_n of deterministic tokens without a sampled sibling, where a policy looks ahead."""
        deterministic = self.draft.flags[self.row][1]
        deterministic_places = [
            []
            if node in self.sampled_child
            else [place for place in places if deterministic[place]]
            for node, places in enumerate(self.draft.children(self.row))
        ]
        if not any(deterministic_places):
            return
        self.raised = [math.nan] * len(self.ids)
        q_n = q[list(self.above), self.ids[: len(self.above)]].double().tolist()
        for policy in assigned.policies:
            look_ahead = policy.look_ahead
            raised = [] if look_ahead is None else look_ahead.tree(q_n, deterministic_places)
            for node, places in enumerate(deterministic_places if raised else ()):
                if places and assigned.policy(self.row, node) is policy:
                    for place in places:
                        self.raised[place] = raised[place]

    def run(self, assigned: Assignment, coins: Sequence[float], draws: Sequence[float]) -> Run:
        """Return the run of sampled tokens from the current node on."""
        places, node = [], self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]
        ids, own = [self.ids[place] for place in places], [coins[place] for place in places]
        run = Run(self.row, nodes, draws[self.draws_taken], ids, own)
        # deterministic tokens do not change h = q
        if any(policy.highest > 1 for policy in assigned.policies):
            run.deterministic = {
                place: fixed
                for place, node in enumerate(nodes)
                if (fixed := self.deterministic_ids[node])
                and assigned.policy(self.row, node).highest > 1
            }
        if self.raised:
            children = zip(self.above, self.ids, self.raised, strict=False)
            run.ahead = {token: h_n for above, token, h_n in children if above == node and h_n > 0}
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
        # a refused token is drawn again only by rounding, and the tokens below it are biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.path += caught
        self.node = caught[0] + 1
        return True

    def go_freely(self, q: Float[Tensor, "batch K1 vocab"], draws: Sequence[float]) -> bool:
        """Draw from q at nodes without a drafted token; return whether the walk goes on."""
        while self.node not in self.sampled_child and not self.deterministic_ids[self.node]:
            run = Run(self.row, [self.node], draws[self.draws_taken])
            run.last = pick_one(q[self.row, self.node], run.draw)
            if not self.go_on(run):
                return False
        return True
