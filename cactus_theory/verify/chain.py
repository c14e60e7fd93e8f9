"""Verify one chain of drafted tokens per row, token by token; on a device all tokens at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies._base import keep_probability, one_hot
from cactus_theory.verify._chain_host import ChainOnHost
from cactus_theory.verify._tensors import verify_tensors
from cactus_theory.verify.contract import Assignment, Draft, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick
from cactus_theory.verify.registry import register_verifier

ChainVerdict = Verdict


@register_verifier("chain")
class Chain(Verifier):
    """Token n at place i is kept iff its coin < φ(n), up to the first refusal.

    After it one token comes from the policy's recovery law; if all were kept, from the target
    row that follows them. Needs only φ and g of a policy.

    Examples
    --------
    >>> Chain().spec, Chain().coins(4)
    ('chain', 4)
    """

    def verify(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        """Return what is emitted; whole rows are read only where a decision needs them."""
        ids = draft.token_ids
        if not ids.shape[1]:
            last = pick(target_probs[:, 0], draw)
            return Verdict(ids, torch.zeros_like(last), last)
        if ids.is_cuda:
            return Verdict(ids, *chain_on_device(assigned, target_probs, draft, accept, draw))
        return Verdict(ids, *ChainOnHost(assigned, target_probs, draft, accept, draw).run())

    def law(
        self,
        assigned: Assignment,
        target_probs: Float[Tensor, "batch K1 vocab"],
        draft: Draft,
    ) -> VerdictLaw:
        """Return the exact law of the verdict: φ and g of every token."""
        q, ids = target_probs.double(), draft.token_ids
        width = ids.shape[1]
        p = one_hot(ids, q) if draft.probs is None else draft.probs.double()
        counts = torch.as_tensor(draft.counts, device=ids.device)[:, None]
        on = torch.arange(width, device=ids.device) < counts
        kept = q.new_zeros(ids.shape)
        recovered, emitted = torch.zeros_like(q[:, :width]), torch.zeros_like(q[:, :width])
        for number, policy in enumerate(assigned.policies):
            own = on if assigned.choice is None else on & (assigned.choice == number)
            rows = q[:, :width][own], p[own], ids[own]
            kept[own] = policy.acceptance(rows[0], rows[1], rows[2][:, None])[:, 0]
            recovered[own] = policy.recovery(*rows)
            emitted[own] = policy.emitted(*rows[:2])
        start = torch.ones_like(q[:, :1, 0])
        alive = torch.cat([start, kept.cumprod(-1)], -1)
        refused = torch.where(
            on, 1 - kept, (torch.arange(width, device=ids.device) == counts) * 1.0
        )
        full = (counts == width).double()
        stop = alive * torch.cat([refused, full], -1)
        last = torch.cat([recovered, torch.zeros_like(q[:, :1])], 1)
        batch = torch.arange(len(ids), device=ids.device)
        last[batch, counts[:, 0]] = q[batch, counts[:, 0]]
        return VerdictLaw(stop, last, alive, emitted, kept)


def verify_chain(
    rule: Policy | Sequence[Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Keep drafted tokens up to the first rejection, then emit one more token per row.

    Token n at position i is kept iff its coin < φ(n). After the first rejection the token
    comes from the policy's recovery law; if all were kept, from the target row after them.

    Parameters
    ----------
    rule : one policy, or one per row.
    target_probs : (B, K + 1, V) target rows, the last one for the bonus token.
    draft_probs : (B, K, V) draft rows, or None if the draft was certain of its tokens.
    draft_token_ids : (B, K) int64; −1 ends a row's draft, and rows after it are not read.
    generator : one torch.Generator, or one per row (a row then behaves as if alone).
    coins : (accept (B, K), draw (B,)) in [0, 1) instead of a generator: every choice fixed.
    validate : check values and divide rows by their float64 sum; False does neither, but where
        a token is to be decided by a row with NaN or drawn from one without mass it raises (on
        CUDA, where nothing is read on the host, that token is −1).

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary,
        coins and a generator.
    TypeError
        Ids that are not int64, rows of different dtypes, a rule that is not a Policy.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]])
    >>> coins = torch.tensor([[0.3, 0.5]]), torch.tensor([0.7])  # φ is 1, then 2/9
    >>> step = ct.verify_chain(ct.policy("speculative"), q, p, torch.tensor([[0, 0]]), coins=coins)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[ 0,  1, -1]]), tensor([1]))
    """
    return verify_tensors(
        Chain(), rule, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )


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
