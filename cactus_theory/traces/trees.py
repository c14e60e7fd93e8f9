r"""Expected tokens and divergence of random walks down drafted trees.

A walk that comes to a node with probability m is judged along the run of sampled tokens below
it: with the chances :math:`s_i` to stop after i of them the token after those has the law
:math:`g_i`, and where it is a child c the walk comes there with probability :math:`m s_i g_i(c)`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.decoding._verification import path_to, rows_at
from cactus_theory.decoding.schedule import Schedule
from cactus_theory.divergences import Divergence
from cactus_theory.policies import Policy
from cactus_theory.policies._decisions import Path
from cactus_theory.policies._policy import accept_probability
from cactus_theory.traces._shard import Cycle
from cactus_theory.traces.trace import Trace
from cactus_theory.verify._runs import Descent
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Verdict, Verified
from cactus_theory.verify.tree import Tree


class Place(NamedTuple):
    """A node of a run: its alive ratio, what its token's coin is compared with, h and g."""

    node: int
    alive: float
    value: float
    emitted: Tensor
    following: Tensor


class TreeWalk:
    """Adds to ``sums`` the expected tokens and divergences of one cycle, by depth of the tree."""

    def __init__(
        self, policy: Policy, verifier: Tree, cycle: Cycle, kinds: Mapping[str, Divergence],
        ends: frozenset[int], sums: Any,
    ) -> None:  # fmt: skip
        self.policy, self.verifier, self.kinds = policy, verifier, kinds
        self.ends, self.sums = ends, sums
        self.text, self.q, draft = cycle.text, cycle.target_probs, cycle.draft()
        self.ids, self.whole = cycle.draft_token_ids.tolist(), verifier.runs == "block"
        self.r = self.q if draft.probs is None else draft.probs[0]
        self.steps, assigned = Descent(draft, 0, self.ids), Assignment((policy,))
        self.depth = draft.depths[0]
        self.children = draft.children(0)
        nodes = [node for node, children in enumerate(self.children) if children]
        self.number, self.path = {node: number for number, node in enumerate(nodes)}, None
        if nodes:
            raised = verifier.looked_ahead(policy, self.q[None], draft)
            alive, none = self.q.new_ones(1, len(self.ids)), draft.token_ids.new_zeros(1)
            verdict = Verdict(draft.token_ids, none, none, None, [nodes], alive, raised)
            verified = Verified(assigned, self.q[None], draft, verdict)
            self.rows, self.path = rows_at(0, nodes, verified), path_to(0, nodes, verified)
        self.sums.tokens[self.text] += 1.0
        self.visit(0, 1.0)

    def visit(self, node: int, mass: float) -> None:
        """Add what a walk that comes to a node with this probability does from there."""
        run = self._run(node)
        after = [place.value for place in run[1:]] + [0.0]
        for number, place in enumerate(run):
            reached = mass * place.alive
            if number:
                self._count(place.node, reached)
                if self.ids[place.node - 1] in self.ends:
                    return
            if not self.children[place.node]:
                return
            self.sums.reached[self.depth[place.node], self.text] += reached
            for spec, kind in self.kinds.items():
                spent = float(kind.value(place.emitted, self.q[place.node]))
                self.sums.spent[spec][self.text] += reached * spent
            if self.whole:
                stop = place.value * math.prod(1 - value for value in after[number:])
            else:
                stop = place.alive * (1 - after[number])
            for child in self.children[place.node]:
                caught = mass * stop * float(place.following[self.ids[child]])
                if child != self.steps.sampled_child.get(place.node) and caught > 0:
                    self._count(child + 1, caught)
                    if self.ids[child] not in self.ends:
                        self.visit(child + 1, caught)

    def _count(self, node: int, mass: float) -> None:
        """Count a drafted token, and the one that follows it unless the text ends."""
        self.sums.accepted[self.text] += mass
        self.sums.accepted_at[self.depth[node] - 1, self.text] += mass
        self.sums.tokens[self.text] += mass * (self.ids[node - 1] not in self.ends)

    def _run(self, node: int) -> list[Place]:
        """Return the nodes from one on along sampled tokens, as far as they can be reached."""
        run, alive, acceptance = [], 1.0, 1.0
        while True:
            q, fixed = self.q[node], self.steps.deterministic_ids[node]
            child = self.steps.sampled_child.get(node)
            h = self._emitted(node, alive) if fixed or child is not None else q
            if child is None:
                run.append(Place(node, alive, acceptance, h, h))
                return run
            r, token = self.r[node], torch.tensor(self.ids[child], device="cpu")
            aim, value = (alive * h if self.whole else h), acceptance
            acceptance = float(accept_probability(aim[token], r[token]))
            law = (aim - r).clamp(min=0.0)
            if not self.whole and not fixed:  # a proposal's residual is that of its own token
                acceptance = float(self.policy.acceptance(q, r, token[None])[0])
                law = self.policy.residual(q, r, token).double()
            total = float(law.sum())
            if self.whole and alive < 1:
                value = total / (total + (1 - alive))
            run.append(Place(node, alive, value, h, law / total if total > 0 else q))
            node, alive = child + 1, acceptance if self.whole else alive * acceptance
            if not alive:
                return run

    def _emitted(self, node: int, alive: float) -> Float[Tensor, "vocab"]:
        row = slice(self.number[node], self.number[node] + 1)
        assert self.path is not None
        raised = None if self.path.raised is None else self.path.raised[row]
        if raised is not None and not bool(raised.isfinite()):
            raised = None
        path = Path(self.q.new_tensor([alive if self.whole else 1.0]), raised)
        q, p = (rows[row] for rows in self.rows)
        return self.verifier.emitted(self.policy, q, p, path).laws[0].double()


def replay_trees(
    trace: Trace,
    policy: Policy | Schedule,
    verifier: Verifier,
    kinds: dict[str, Divergence],
    sums: Sequence[Any],
    on_cycles: Callable[[int], None] | None,
) -> None:
    """Add to the last of ``sums`` what walks down the trees of each cycle do."""
    if not isinstance(verifier, Tree):
        raise trace.refusal(f"verifier: {verifier.spec}")
    if isinstance(policy, Schedule):
        raise trace.refusal(f"policy: the schedule {policy.spec}")
    if len(sums) > 1 or sums[0].width < trace.num_draft_tokens:
        raise trace.refusal("num_draft_tokens: a shorter draft")
    verifier.check(policy)
    ends = frozenset(trace.header.eos_token_ids)
    for number, cycle in enumerate(trace.cycles(), 1):
        sums[-1].cycles[cycle.text] += 1.0
        sums[-1].drafts[cycle.text] += len(cycle.draft_token_ids) > 0
        sums[-1].drafted[cycle.text] += len(cycle.draft_token_ids)
        TreeWalk(policy, verifier, cycle, kinds, ends, sums[-1])
        if on_cycles is not None:
            on_cycles(number)
