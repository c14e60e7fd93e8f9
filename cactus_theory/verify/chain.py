"""Verify one chain of drafted tokens per row, token by token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies._base import one_hot
from cactus_theory.verify._chain_device import chain_on_device
from cactus_theory.verify._chain_host import ChainOnHost
from cactus_theory.verify._tensors import verify_tensors
from cactus_theory.verify.contract import Assignment, Draft, Verdict, VerdictLaw, Verifier
from cactus_theory.verify.draw import Coins, Generators, pick
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
