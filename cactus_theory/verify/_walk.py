"""Blocks and trees on a CPU: a path is a tree whose nodes have one child.

Runs of sampled tokens are judged together, each in two sweeps. Forward, the alive ratio P is
followed from token to token as far as any later coin could still pass; bounds from the drafted
entries (:meth:`Policy.ratio_bounds`) spare most rows. Backward, the last token that passes is
found: P = 1 always does and a coin above P never, so few residuals are summed. The token that is
drawn there ends a chain; in a tree it may be a child, and the walk goes on along the run from it.

What certain tokens change at a node is how far these are raised: one number, so that no selection
law is written out where the policy answers rows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.scratch import scratch
from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.policies._records import Node, Path
from cactus_theory.verify._host import Index, Left, OnHost, Place, Run, residual, rows_at
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick_one


class Blocks(OnHost):
    """Runs of a draft, each judged as a block.

    ``raised`` are the h_n of certain drafts by policy, ``bonus`` the rows that wholly accepted
    chains end with, if not those of q. Of trees p is given, and not read where nothing is sampled.
    """

    def __init__(
        self,
        assigned: Assignment,
        q: Float[Tensor, "texts nodes vocab"],
        p: Float[Tensor, "texts rows vocab"] | None,
        draft: Draft,
        runs: Sequence[Run],
        index: Index,
        bonus: Float[Tensor, "batch vocab"] | None = None,
    ) -> None:
        super().__init__(assigned, q, p, runs, index)
        self.draft, self.bonus = draft, bonus
        if any(run.cut for run in runs) and p is None:
            draft = replace(draft, counts=[run.count for run in runs])
        self.raised = raised_entries(assigned, q, p, draft)
        self.q_rows, self.p_rows = q.numpy(), None if p is None else p.numpy()
        lists = (part.tolist() for part in (self.q_n, self.p_n, *self._bounds(index)))
        for run, run.q_n, run.p_n, run.low, run.high in zip(runs, *lists, strict=True):
            for place in run.certain:
                self._widen(run, place)

    def _bounds(self, index: Index) -> tuple[Tensor, Tensor]:
        """Return bounds on h_n/p_n of the drafted tokens."""
        bounds = [
            policy.ratio_bounds(self.q_n, self.p_n) if raised is None else (raised, raised)
            for policy, raised in zip(self.assigned.policies, self.raised, strict=True)
        ]
        if self.assigned.choice is None:
            return bounds[0]
        choice = self.assigned.choice[index[:2]][None]
        low, high = (torch.stack(part).gather(0, choice)[0] for part in zip(*bounds, strict=True))
        return low, high

    def _widen(self, run: Run, place: int) -> None:
        """Let the bounds of a drafted token hold beside certain ones, or as one of them."""
        if place >= run.count:
            return
        policy = self._policy(run, place)
        if not policy.answers_rows:
            run.low[place], run.high[place] = 0.0, math.inf
        elif run.ids[place] in run.certain[place]:
            q_n, p_n = run.q_n[place], run.p_n[place]
            run.high[place] = policy.highest * q_n / p_n if p_n > 0 else math.inf

    def _policy(self, run: Run, place: int) -> Policy:
        return self.assigned.policies[self.number(run, place)]

    def judge(self) -> None:
        """Find how many tokens of each run are accepted, and the token after them."""
        waiting = self.runs
        while waiting:
            waiting = [run for run in waiting if run.advance()]
            self._follow([(run, len(run.alive) - 1) for run in waiting])
            for run in waiting:
                run.alive.append(min(1.0, run.ratio))
        ends = [(run, len(run.alive) - 1) for run in self.runs]
        while ends:
            ends = self._end([(run, run.last_below(place)) for run, place in ends])
        for run in self.runs:  # a path of ratio 0 ends whatever follows
            if run.cut and run.alive[-1]:
                run.accepted, run.last = run.count, NO_TOKEN

    def _end(self, ends: Sequence[Place]) -> list[Place]:
        """Draw the token after nodes whose coin passes; return those before the others."""
        for run, place in ends:
            run.accepted = place
        whole = [run for run, place in ends if place == run.count]
        self.draw_each(whole, [self._last_row(run) for run in whole])
        ending = [(run, place) for run, place in ends if place < run.count]
        unknown = [(run, place) for run, place in ending if place not in run.left]
        failed = {at for at in unknown if not self._may_end(*at)}
        self._follow([at for at in unknown if at not in failed], ends=True)
        for places in self.chunks([at for at in ending if at not in failed]):
            failed |= self._settle(places)
        return [(run, place - 1) for run, place in failed]

    def _may_end(self, run: Run, place: int) -> bool:
        """Return whether a run could end at a node if its scale were P, the most it can be.

        Where not, the node need not be solved; of policies that answer rows.
        """
        alive, policy = run.alive[place], self._policy(run, place)
        if self.p_rows is None or not policy.answers_rows:
            return True
        if not place or alive == 1 or run.low[place] == run.high[place]:
            return True
        level = alive
        if fixed := run.certain.get(place):  # the most that certain tokens can have
            inside = math.fsum(self.q_rows[run.row, run.nodes[place]][fixed].tolist())
            level = alive * min(policy.highest, 1 / (inside or 1.0))
        out = scratch("walk.residual", self.q.shape[-1:], self.q.dtype)
        self._leave(out, run, place, (alive, level))
        return run.passes(place, float(out.sum()))

    def _settle(self, places: Sequence[Place]) -> set[Place]:
        """Draw after the nodes whose coin passes; return the others."""
        rows = scratch("walk.residual", (len(places), self.q.shape[-1]), self.q.dtype)
        for row, (run, place) in zip(rows, places, strict=True):
            self._leave(row, run, place, run.left[place])
        passed, laws, failed = [], [], set()
        for law, mass, (run, place) in zip(rows, rows.sum(-1).tolist(), places, strict=True):
            if run.passes(place, mass):  # rounding reaches 0: then from q
                passed.append(run)
                laws.append(self.q[run.row, run.nodes[place]] if mass <= 0 else law)
            else:
                failed.add((run, place))
        self.draw_each(passed, laws)
        return failed

    def _leave(self, out: Float[Tensor, "vocab"], run: Run, place: int, left: Left) -> None:
        """Write (P h − p)₊ of a node to ``out``."""
        at = run.row, run.nodes[place]
        if isinstance(left, Tensor):
            out.copy_(left).clamp_(min=0.0)
            return
        scale, level = left
        if self.p_rows is None:
            torch.mul(self.q[at], scale, out=out)
            out[run.ids[place]] -= 1.0
            out.clamp_(min=0.0)
            return
        q, p, row = self.q_rows[at], self.p_rows[at], out.numpy()
        residual(q, p, scale, row)
        if fixed := run.certain.get(place):
            row[fixed] = np.maximum(level * q[fixed] - p[fixed], 0.0)

    def _last_row(self, run: Run) -> Float[Tensor, "vocab"]:
        """Return h after a whole run up to a factor: q, where nothing is certain."""
        place = run.count
        at, fixed = (run.row, run.nodes[place]), run.certain.get(place)
        q = self.q[at]
        if self.bonus is not None:
            return self.bonus[run.row]
        if not fixed or run.cut:
            return q
        if run.ahead:  # the others in proportion to q
            law = q.index_fill(0, torch.tensor([*run.ahead]), 0.0)
            rest = float(law.sum(dtype=torch.float64))
            law *= (1 - math.fsum(run.ahead.values())) / rest if rest > 0 else 0.0
            law[[*run.ahead]] = law.new_tensor([*run.ahead.values()])
            return law
        policy, alive = self._policy(run, place), run.alive[place]
        if not policy.answers_rows:
            return self._row(policy, run, place)
        row = self.q_rows[at]
        node = Node(row, np.zeros_like(row), 0.0, 0.0, alive=alive, ends=True, certain=fixed)
        _, scale, level = policy.follow_row(node)
        assert scale is not None and level is not None  # the run ends there
        law = q * scale
        law[fixed] = q[fixed] * level
        return law

    def _follow(self, places: Sequence[Place], ends: bool = False) -> None:
        """Ask the policies about nodes, where runs go on or end; keep ratios and what is left."""
        for number, own in self.by_policy(places):
            policy, raised = self.assigned.policies[number], self.raised[number]
            if raised is not None:
                for run, place in own:  # q is scaled beside the token that is raised to h_n
                    rest = 1 - run.q_n[place]
                    mass = run.alive[place] * (1 - run.low[place])
                    run.left[place] = mass / rest if rest > 0 else 0.0, None
            elif self.p_rows is not None and policy.answers_rows:
                for run, place in own:
                    self._follow_row(policy, run, place, ends)
            else:
                for run, place in own:
                    if place in run.certain:
                        self._follow_law(policy, run, place)
                for chunk in self.chunks([at for at in own if at[1] not in at[0].certain]):
                    self._follow_chunk(policy, chunk)

    def _follow_row(self, policy: Policy, run: Run, place: int, ends: bool) -> None:
        assert self.p_rows is not None
        at, fixed = (run.row, run.nodes[place]), run.certain.get(place, ())
        node = Node(
            self.q_rows[at],
            self.p_rows[at],
            run.q_n[place],
            run.p_n[place],
            alive=run.alive[place],
            ends=ends,
            certain=fixed,
            joint=run.ids[place] in fixed,
        )
        run.ratio, scale, level = policy.follow_row(node)
        if scale is not None:
            run.left[place] = scale, level

    def _follow_law(self, policy: Policy, run: Run, place: int) -> None:
        """Follow a node by h of its selection law."""
        assert self.p is not None
        token, r = run.ids[place], check.normalised(self.p[run.row, run.nodes[place]])
        mass = run.alive[place] * self._row(policy, run, place)
        run.ratio = float((mass[token] / r[token]).nan_to_num(nan=0.0))
        run.left[place] = mass - r

    def _row(self, policy: Policy, run: Run, place: int) -> Float[Tensor, "vocab"]:
        """Return h at a node from its selection law."""
        at = rows_at([(run, place)])
        q = self.q[at]
        law = self.draft.offers(run.row, [run.nodes[place]], q)
        target = policy.target_in_block(check.normalised(q), law, self._path([(run, place)]))
        assert target is not None  # check() has seen the policy
        return target[0].double()

    def _follow_chunk(self, policy: Policy, places: Sequence[Place]) -> None:
        at, ids = rows_at(places), torch.tensor([run.ids[place] for run, place in places])
        q = self.q[at]
        p = one_hot(ids, q) if self.p is None else self.p[at]
        step = policy.follow(q, p, ids, self._path(places))
        ratios, left = step.ratio.tolist(), step.residual
        for entry, (run, place) in enumerate(places):
            run.ratio = ratios[entry]
            if left.rows is None:
                run.left[place] = left.scale_at(entry), None
            else:
                run.left[place] = left.rows[entry]

    def _path(self, places: Sequence[Place]) -> Path:
        alive = [run.alive[place] for run, place in places]
        left = [self.draft.left(run.row)[run.nodes[place]] for run, place in places]
        return Path(torch.tensor(alive, dtype=torch.float64), torch.tensor(left))


class Tokens(Blocks):
    """The same token by token: each is kept with a coin of its own."""

    def judge(self) -> None:
        """Find how many tokens of each run are accepted, and the token after them."""
        for run in self.runs:
            run.alive = [1.0] * (run.count + 1)
            while run.accepted < run.count and self._keeps(run, run.accepted):
                run.accepted += 1
            if run.accepted == run.count and not run.cut:
                run.last = pick_one(self._last_row(run), run.draw)

    def _keeps(self, run: Run, place: int) -> bool:
        """Return whether the token at a place is kept; if not, draw the one that replaces it."""
        at, coin = [(run, place)], run.coins[place]
        if place in run.certain:
            self._follow(at)
            if coin < run.ratio:
                return True
            self._follow([] if place in run.left else at, ends=True)
            self._settle(at)
            return False
        assert self.p is not None
        index = rows_at(at)
        rows = self.q[index], self.p[index], torch.tensor([run.ids[place]])
        decision = self._policy(run, place).decide(*rows, torch.tensor([coin], dtype=torch.float64))
        if bool(decision.kept) or decision.residual is None:
            return True
        run.last = pick_one(decision.residual.law(*rows)[0], run.draw)
        return False


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
    def certain_ids(self) -> list[list[int]]:
        """Return the ids of the certain tokens after each node."""
        return self.draft.fixed(self.row)

    def look_ahead(self, assigned: Assignment, q: Float[Tensor, "K1 vocab"]) -> None:
        """Set h_n of certain tokens beside which none was sampled, where a policy looks ahead."""
        certain = self.draft.flags[self.row][1]
        certain_places = [
            [] if node in self.sampled_child else [place for place in places if certain[place]]
            for node, places in enumerate(self.draft.children(self.row))
        ]
        if not any(certain_places):
            return
        self.raised = [math.nan] * len(self.ids)
        q_n = q[list(self.above), self.ids[: len(self.above)]].double().tolist()
        for policy in assigned.policies:
            raised = policy.certain_tree(q_n, certain_places)
            for node, places in enumerate(certain_places if raised is not None else ()):
                if places and assigned.policy(self.row, node) is policy:
                    for place in places:
                        self.raised[place] = raised[place]  # type: ignore[index]

    def run(self, assigned: Assignment, coins: Sequence[float], draws: Sequence[float]) -> Run:
        """Return the tokens that were sampled one after another from here."""
        places, node = [], self.node
        while (place := self.sampled_child.get(node)) is not None:
            places.append(place)
            node = place + 1
        nodes = [self.node, *(place + 1 for place in places)]
        ids, own = [self.ids[place] for place in places], [coins[place] for place in places]
        run = Run(self.row, nodes, draws[self.draws_taken], ids, own)
        run.certain = {  # not to h = q
            place: fixed
            for place, node in enumerate(nodes)
            if (fixed := self.certain_ids[node]) and assigned.policy(self.row, node).highest > 1
        }
        if self.raised:
            children = zip(self.above, self.ids, self.raised, strict=False)
            run.ahead = {token: h_n for above, token, h_n in children if above == node and h_n > 0}
        return run

    def go_on(self, run: Run) -> bool:
        """Take what came of a run; return whether the token drawn after it is a child."""
        taken = run.nodes[: run.accepted + 1]
        end = taken[-1]
        self.charged |= zip(taken if end in self.above else taken[:-1], run.alive, strict=False)
        self.path += [node - 1 for node in taken[1:]]
        self.last, self.draws_taken = run.last, self.draws_taken + 1
        if run.last not in self.ids:
            return False
        children = zip(self.above, self.ids, strict=False)
        caught = [place for place, child in enumerate(children) if child == (end, run.last)]
        # what was refused does not come back but by rounding, and what is below it is biased
        if not caught or caught[0] == self.sampled_child.get(end):
            return False
        self.path += caught
        self.node = caught[0] + 1
        return True

    def go_freely(self, q: Float[Tensor, "batch K1 vocab"], draws: Sequence[float]) -> bool:
        """Draw from q where nothing was drafted by a law; return whether the walk goes on."""
        while self.node not in self.sampled_child and not self.certain_ids[self.node]:
            run = Run(self.row, [self.node], draws[self.draws_taken])
            run.last = pick_one(q[self.row, self.node], run.draw)
            if not self.go_on(run):
                return False
        return True


def raised_entries(
    assigned: Assignment, q: Float[Tensor, "texts nodes vocab"], p: Tensor | None, draft: Draft
) -> list[Tensor | None]:
    """Return h_n (B, K) of a certain draft under each policy; None where it does not look ahead."""
    if p is not None:
        return [None] * len(assigned.policies)
    ids = draft.token_ids
    q_n = q[:, : ids.shape[1]].gather(-1, ids[..., None])[..., 0].double()
    counts = torch.as_tensor(draft.counts, device=ids.device)
    return [policy.certain_path(q_n, counts) for policy in assigned.policies]


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
