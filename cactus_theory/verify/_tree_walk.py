"""Blocks and trees on a CPU: a path is a tree whose nodes have one child.

Runs of sampled tokens are judged together, each in two sweeps. Forward, the alive ratio P is
followed from token to token as far as any later coin could still pass; bounds from the drafted
entries (:meth:`Shortcuts.bounds`) spare most rows. Backward, the last token that passes is
found: P = 1 always does and a coin above P never, so few residuals are summed. The token that is
drawn there ends a chain; in a tree it may be a child, and the walk goes on along the run from it.

What deterministic tokens change at a node is how far these are raised: one number, so that no
selection law is written out where the policy answers rows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.reused_memory import scratch
from cactus_theory.policies._shortcuts import ByRow
from cactus_theory.verify._cpu import Nodes, Place, Run
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one


class Blocks(Nodes):
    """The nodes of runs that are judged as blocks."""

    def _widen(self, run: Run, place: int) -> None:
        """Widen a drafted token's bounds where it, or a token beside it, is deterministic."""
        if place >= run.count:
            return
        by_row = self.policy(run, place).shortcuts
        if not isinstance(by_row, ByRow):
            run.low[place], run.high[place] = 0.0, math.inf
        elif run.ids[place] in run.deterministic[place]:
            q_n, p_n = run.q_n[place], run.p_n[place]
            run.high[place] = by_row.highest * q_n / p_n if p_n > 0 else math.inf

    def judge(self) -> None:
        """Set the accepted count of each run, and the token after it."""
        draft = self.draft
        if any(run.cut for run in self.runs) and self.p is None:
            draft = replace(draft, counts=[run.count for run in self.runs])
        self.raised = raised_entries(self.assigned, self.q, self.p, draft)
        bounds = [
            policy.shortcuts.bounds(self.q_n, self.p_n) if raised is None else (raised, raised)
            for policy, raised in zip(self.assigned.policies, self.raised, strict=True)
        ]
        low, high = (self.chosen(bound).tolist() for bound in zip(*bounds, strict=True))
        for run, run.low, run.high in zip(self.runs, low, high, strict=True):
            for place in run.deterministic:
                self._widen(run, place)
        waiting = self.runs
        while waiting:
            waiting = [run for run in waiting if run.advance()]
            self.follow([(run, len(run.alive) - 1) for run in waiting])
            for run in waiting:
                run.alive.append(min(1.0, run.ratio))
        ends = [(run, len(run.alive) - 1) for run in self.runs]
        while ends:
            ends = self._end([(run, run.last_below(place)) for run, place in ends])
        for run in self.runs:  # a path of ratio 0 ends before the row of NaN
            if run.cut and run.alive[-1]:
                run.accepted, run.last = run.count, NO_TOKEN

    def _end(self, ends: Sequence[Place]) -> list[Place]:
        """Draw the token after nodes whose coin passes; return the nodes before the others."""
        for run, place in ends:
            run.accepted = place
        whole = [run for run, place in ends if place == run.count]
        self.draw_each(whole, [self.last_row(run) for run in whole])
        ending = [(run, place) for run, place in ends if place < run.count]
        unknown = [(run, place) for run, place in ending if place not in run.left]
        failed = {at for at in unknown if not self._may_end(*at)}
        self.follow([at for at in unknown if at not in failed], ends=True)
        for places in self.chunks([at for at in ending if at not in failed]):
            failed |= self.settle(places)
        return [(run, place - 1) for run, place in failed]

    def _may_end(self, run: Run, place: int) -> bool:
        """Return whether a run could end at a node with the largest scale, P.

        Where not, the node need not be solved; of policies that answer rows.
        """
        alive, by_row = run.alive[place], self.policy(run, place).shortcuts
        if self.rows is None or not isinstance(by_row, ByRow):
            return True
        if not place or alive == 1 or run.low[place] == run.high[place]:
            return True
        level = alive
        if fixed := run.deterministic.get(place):  # the largest P h/q of deterministic tokens
            inside = math.fsum(self.q[run.row, run.nodes[place]][fixed].tolist())
            level = alive * min(by_row.highest, 1 / (inside or 1.0))
        if (row := self.scaled(run, place, (alive, level))) is not None:
            return run.passes(place, row.mass)
        out = scratch("host.residual", self.q.shape[-1:], self.q.dtype)
        self.leave(out, run, place, (alive, level))
        return run.passes(place, float(out.sum()))


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
            look_ahead = policy.shortcuts.look_ahead
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
        if any(policy.shortcuts.highest > 1 for policy in assigned.policies):
            run.deterministic = {
                place: fixed
                for place, node in enumerate(nodes)
                if (fixed := self.deterministic_ids[node])
                and assigned.policy(self.row, node).shortcuts.highest > 1
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


def raised_entries(
    assigned: Assignment, q: Float[Tensor, "texts nodes vocab"], p: Tensor | None, draft: Draft
) -> list[Tensor | None]:
    """Return h_n (B, K) of a deterministic draft by policy; None for one that looks not ahead."""
    if p is not None:
        return [None] * len(assigned.policies)
    ids = draft.token_ids
    q_n = q[:, : ids.shape[1]].gather(-1, ids[..., None])[..., 0].double()
    counts = torch.as_tensor(draft.counts, device=ids.device)
    ahead = [policy.shortcuts.look_ahead for policy in assigned.policies]
    most = None
    if any(own is not None and own.head for own in ahead):
        most = q[:, : ids.shape[1]].amax(-1).double()
    return [
        None if own is None else own.path(q_n, counts, most if own.head else None) for own in ahead
    ]


def entries_as_assigned(raised: list[Tensor | None], assigned: Assignment) -> Tensor | None:
    """Return (B, K) h_n under the policy of each token, NaN where it does not look ahead."""
    if assigned.choice is None:
        return raised[0]
    first = next((entries for entries in raised if entries is not None), None)
    if first is None:
        return None
    mixed = torch.full_like(first, math.nan)
    for number, entries in enumerate(raised):
        if entries is not None:
            mixed = torch.where(assigned.choice == number, entries, mixed)
    return mixed
