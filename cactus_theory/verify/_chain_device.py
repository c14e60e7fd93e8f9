"""A chain on a device: every token is decided at once, and nothing is read on the host."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._base import keep_probability, one_hot
from cactus_theory.verify.contract import Assignment, Draft
from cactus_theory.verify.draw import NO_TOKEN, pick


def chain_on_device(
    assigned: Assignment,
    q: Float[Tensor, "batch K1 vocab"],
    draft: Draft,
    accept: Float[Tensor, "batch K"],
    draw: Float[Tensor, "batch"],
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Return accepted counts and the token that follows them, one recovered row a row."""
    ids, p, choice = draft.token_ids, draft.probs, assigned.choice
    width = ids.shape[1]
    lengths = torch.as_tensor(draft.counts, device=ids.device)
    kept = [_kept(policy, q[:, :width], p, ids, accept) for policy in assigned.policies]
    flags = kept[0] if choice is None else torch.stack(kept).gather(0, choice[None])[0]
    lawful = _lawful(q[:, :width], p, ids)
    flags = flags & lawful & (torch.arange(width, device=ids.device) < lengths[:, None])
    accepted = flags.long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    at = (batch, accepted.clamp(max=width - 1))
    rows = [_recovered(policy, q, p, ids, accept, at) for policy in assigned.policies]
    recovered = rows[0]
    for number, own in enumerate(rows[1:], 1):
        assert choice is not None
        recovered = torch.where((choice[at] == number)[:, None], own, recovered)
    law = torch.where((accepted < lengths)[:, None], recovered, q[batch, accepted])
    lost = (accepted < lengths) & ~lawful[at]
    return accepted, torch.where(lost, NO_TOKEN, pick(law, draw))


def _lawful(q: Tensor, p: Tensor | None, ids: Tensor) -> Bool[Tensor, "batch K"]:
    """Return which drafted tokens have a law to judge them by: others are NaN in their rows."""
    at = ids[..., None]
    entries = q.gather(-1, at) if p is None else q.gather(-1, at) + p.gather(-1, at)
    return ~entries[..., 0].isnan()


def _kept(
    policy: Policy, q: Tensor, p: Tensor | None, ids: Tensor, accept: Tensor
) -> Bool[Tensor, "batch K"]:
    if isinstance(policy, Entrywise):
        at = ids[..., None]
        q_n = q.gather(-1, at)[..., 0].double()
        p_n = torch.ones_like(q_n) if p is None else p.gather(-1, at)[..., 0].double()
        return accept < keep_probability(policy.ceiling(q_n, p_n), p_n)
    return accept < policy.acceptance(q, p, ids[..., None])[..., 0]


def _recovered(
    policy: Policy,
    q: Tensor,
    p: Tensor | None,
    ids: Tensor,
    accept: Tensor,
    at: tuple[Tensor, Tensor],
) -> Float[Tensor, "batch vocab"]:
    """Return rows proportional to the recovery law at one place a row."""
    own_q, own_ids = q[at], ids[at]
    own_p = one_hot(own_ids, own_q) if p is None else p[at]
    residual = policy.decide(own_q, own_p, own_ids, accept[at]).residual
    if residual is None:  # all were kept: the result is not used
        return own_q
    return residual.law(own_q, None if p is None else own_p, own_ids).to(q.dtype)
