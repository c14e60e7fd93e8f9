"""Block verification in torch, from whole rows: on a device, and for the exact law."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.policies.policy import PathState, accept_probability, one_hot
from cactus_theory.policies.tilt import worth_of_rows
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import NO_TOKEN, pick


def block_on_device(
    assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
) -> Verdict:
    """Return the verdict of drafted paths on a device, by block verification in tensors.

    The host reads no value from the device, with one exception: the search for the edges of a band
    of p/P takes one round trip between host and device for each step. P is the alive ratio of a
    node: the probability that the path down to the node is accepted, given that it was drafted.
    """
    ids = draft.token_ids
    blocks = Blocks(assigned, target_probs, draft)
    node = torch.arange(1, ids.shape[1] + 1, device=ids.device)  # coin i is that of node i + 1
    passed = torch.where(accept < blocks.value[:, 1:], node, 0)
    accepted = torch.nn.functional.pad(passed, (1, 0)).amax(-1)  # 0 where nothing was drafted
    last = pick(blocks.last[torch.arange(len(ids), device=ids.device), accepted], draw)
    alive = blocks.alive[:, :-1]
    has_nan = ((blocks.alive > 0) & blocks.value.isnan()).any(-1)  # no coin can decide
    last = torch.where(has_nan, NO_TOKEN, last)
    return Verdict(ids, accepted, last, alive=alive, raised=blocks.raised)


class Blocks:
    """Alive ratios, thresholds and laws of a batch of drafted paths, computed node after node.

    ``alive`` (B, K + 1) is P, 0 beyond a text's drafted tokens. ``value`` (B, K + 1) is the
    threshold below which each node's coin passes, 1 at node 0. ``emitted`` (B, K, V) is h. Rows of
    ``last`` (B, K + 1, V) are proportional to the law of the next token if the path ends there.
    """

    def __init__(self, assigned: Assignment, q: Targets, draft: Draft) -> None:
        ids, (assigned, q) = draft.token_ids, assigned.seen(q)
        self.assigned, self.q, self.p, self.ids = assigned, q, draft.probs, ids
        counts = torch.as_tensor(draft.counts, device=ids.device)
        shape = (len(ids), ids.shape[1] + 1)
        self.alive = torch.zeros(shape, dtype=torch.float64, device=ids.device)
        self.value = torch.zeros_like(self.alive)
        self.last = torch.zeros_like(q)
        self.emitted = torch.zeros(q[:, 1:].shape, dtype=torch.float64, device=ids.device)
        self.alive[:, 0] = 1.0
        batch = torch.arange(len(ids), device=ids.device)
        self.raised = raised_entries(assigned, q, draft)
        for place in range(ids.shape[1]):
            self._step(place, counts)
        self.last[batch, counts] = undrafted(assigned, q, counts).to(q.dtype)
        self.value[batch, counts] = self.alive[batch, counts]  # the last coin passes below P
        self.value[:, 0] = 1.0

    def _step(self, place: int, counts: Tensor) -> None:
        """Fill in the entries of the node after ``place`` tokens, and P of the next node."""
        drafted = (place < counts)[:, None]
        alive, q, ids = self.alive[:, place], self.q[:, place].double(), self.ids[:, place]
        p = one_hot(ids, q) if self.p is None else self.p[:, place].double()
        state = PathState(alive, None if self.raised is None else self.raised[:, place])
        rows = [policy.target(q, p, state) for policy in self.assigned.policies]
        h = self.assigned.chosen(rows, slice(None), place).double()  # type: ignore[arg-type]
        mass = alive[:, None] * h
        residual = (mass - p).clamp(min=0.0)
        residual_mass = residual.sum(-1)
        # R/(R + 1 − P) with R = Σ (P h − p)₊, and 1 at P = 1, even if rounding makes R = 0
        threshold = torch.where(alive == 1, 1.0, residual_mass / (residual_mass + (1 - alive)))
        next_alive = accept_probability(*(row.gather(-1, ids[:, None])[:, 0] for row in (mass, p)))
        # where rounding leaves no residual the token is drawn from q; NaN stays NaN
        last = torch.where((residual_mass <= 0)[:, None], q, residual)
        self.value[:, place] = torch.where(drafted[:, 0], threshold, 0.0)
        self.last[:, place] = torch.where(drafted, last, 0.0).to(self.last.dtype)
        self.emitted[:, place] = torch.where(drafted, h, 0.0)
        self.alive[:, place + 1] = torch.where(drafted[:, 0], next_alive, 0.0)


def raised_entries(
    assigned: Assignment, q: Float[Tensor, "texts nodes vocab"], draft: Draft
) -> Float[Tensor, "texts K"] | None:
    """Return h_n of drafted tokens n, (B, K), if h also depends on the tokens drafted after n.

    Entries of policies without ``look_ahead`` are NaN. Return None if no policy has ``look_ahead``,
    or if the draft was sampled, whose later tokens h must not depend on.
    """
    ahead = [policy.look_ahead for policy in assigned.policies]
    if draft.sampled is not None or draft.probs is not None or not any(ahead):
        return None
    ids, counts = draft.token_ids, torch.as_tensor(draft.counts, device=q.device)
    not_raised = torch.full(ids.shape, math.nan, dtype=torch.float64, device=ids.device)
    tilts = assigned.tilts or (0.0,) * len(ahead)
    target = q if assigned.target is None else assigned.target
    # ``worth``: under a tilt, what each row adds to the worth of tokens before it (Theorem 29)
    rows, raised = q[:, : ids.shape[1]], list[Tensor]()
    for tilt, look_ahead in zip(tilts, ahead, strict=True):
        worth = worth_of_rows(target, tilt) if tilt and look_ahead else None
        raised.append(look_ahead.path(rows, ids, counts, worth) if look_ahead else not_raised)
    return assigned.chosen(raised, slice(None), slice(ids.shape[1]))


def undrafted(
    assigned: Assignment, q: Targets, nodes: Int[Tensor, "batch"]
) -> Float[Tensor, "batch vocab"]:
    """Return each text's row to draw a token from at ``nodes``, where nothing was drafted."""
    batch = torch.arange(len(nodes), device=nodes.device)
    laws = [policy.undrafted(q[batch, nodes]) for policy in assigned.policies]
    last = 0 if assigned.choice is None else assigned.choice.shape[1] - 1
    return assigned.chosen(laws, batch, nodes.clamp(max=last))
