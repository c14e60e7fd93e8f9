r"""Siblings beside a drafted path: what they catch on a trace of paths.

A caught token ends the round with one token from the target (THEORY.md, Theorem 22), so that no
row below a sibling is needed: the siblings of a place are the m likeliest tokens of the draft's
row there, and a round that comes to it with probability :math:`P_i` replaces the drafted token by
sibling t with probability :math:`(P_i h(t) − p(t))_+` in a block, :math:`P_i (h(t) − p(t) φ(t))`
token by token, averaged over what is drafted from that place on.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float

from cactus_theory.policies import FixedTarget, Policy
from cactus_theory.traces.estimate import Replay
from cactus_theory.traces.replays import ENTRIES, shares_rows
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.draft import Assignment, Draft
from cactus_theory.verify.tree import RUNS, Tree


@dataclass(frozen=True, eq=False)
class TreeReplay(Replay):
    """What a policy does on drafted paths with siblings; ``kept`` counts caught tokens, too.

    Attributes
    ----------
    followed : (K, T), how often a token follows one that is caught at place i.
    """

    followed: Float[np.ndarray, "K texts"]


def with_caught(
    paths: dict[int, Replay], trace: Trace, policy: Policy, runs: str, siblings: int
) -> dict[int, Replay]:
    """Return the replays of drafted paths at several K, with so many siblings at each place."""
    found: dict[int, Replay] = {}
    caught = None
    for width in sorted(paths, reverse=True):
        own = paths[width]
        if caught is None or not shares_rows(policy, runs):
            caught = _caught(trace, policy, runs, siblings, width)
        every, followed = caught[:, :width]
        sums = {
            "verifier": Tree(runs).spec,
            "tokens": own.tokens + followed.sum(0),
            "accepted": own.accepted + every.sum(0),
            "kept": own.kept + every,
        }
        path = {one.name: getattr(own, one.name) for one in fields(Replay)}
        found[width] = TreeReplay(**path | sums, followed=followed)
    return found


def _caught(
    trace: Trace, policy: Policy, runs: str, siblings: int, width: int
) -> Float[np.ndarray, "2 K texts"]:
    """Return how often siblings are caught, and how often a token follows them."""
    found = np.zeros((2, width, trace.texts))
    ends = torch.tensor(trace.header.eos_token_ids, dtype=torch.int64)
    for batch in trace.batches(ENTRIES, width):
        q, p, ids = batch.target_probs, batch.draft_probs, batch.draft_token_ids
        if p is None:
            continue
        law = RUNS[runs].law(Assignment((policy,)), q, Draft(ids, [ids.shape[1]] * len(ids), p))
        assert law.emitted is not None
        h, alive = law.emitted, law.alive[:, :-1, None]
        if runs == "block":
            replaced = (alive * h - p).clamp(min=0)
        elif isinstance(policy, FixedTarget):
            replaced = alive * (h - p).clamp(min=0)
        else:
            replaced = alive * (h - p * policy.keep(q[:, :-1], p))
        likely = p.topk(min(siblings, p.shape[-1]))
        own = torch.where(likely.values > 0, replaced.gather(-1, likely.indices), 0.0)
        ended = torch.isin(ids, ends)
        own[ended.cumsum(-1) - ended.long() > 0] = 0.0  # places after the end of a text
        goes_on = ~torch.isin(likely.indices, ends)
        for place in range(ids.shape[1]):
            for sums, each in zip(found, (own, own * goes_on), strict=True):
                np.add.at(sums[place], batch.text.numpy(), each[:, place].sum(-1).numpy())
    return found
