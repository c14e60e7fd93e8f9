"""Token-by-token verification of one drafted chain per text, by a policy's acceptance φ.

A rejected token is replaced by a draw from the policy's residual distribution g. On a CPU a
vocabulary row is read only if a decision needs the whole row. On a CUDA device φ of all drafted
tokens is computed at once.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.policies import Entrywise, Policy
from cactus_theory.policies.policy import one_hot
from cactus_theory.verify.checks import verify_tensors
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, pick
from cactus_theory.verify.on_device import undrafted
from cactus_theory.verify.walk import Walk, chains


@register_verifier("chain")
class Chain(Verifier):
    """Accept tokens one by one, by the policy's acceptance and residual (:func:`verify_chain`)."""

    def verify(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict. On a CPU a vocabulary row is read only if a decision needs it."""
        ids = draft.token_ids
        if ids.is_cuda:
            return Verdict(ids, *chain_on_device(assigned, target_probs, draft, accept, draw))
        walk = Walk(self, assigned, target_probs, draft, *chains(draft, accept, draw))
        walk.forwards()
        return Verdict(ids, *walk.accepted_and_last(), paths=walk.paths)

    def law(self, assigned: Assignment, target_probs: Targets, draft: Draft) -> VerdictLaw:
        """Return the exact law of the verdict, from φ and g of every drafted token."""
        q, ids = target_probs.double(), draft.token_ids
        width = ids.shape[1]
        p = one_hot(ids, q) if draft.probs is None else draft.probs.double()
        counts = torch.as_tensor(draft.counts, device=ids.device)
        drafted = torch.arange(width, device=ids.device) < counts[:, None]
        phi = q.new_zeros(ids.shape)
        recovered, emitted = torch.zeros_like(q[:, :width]), torch.zeros_like(q[:, :width])
        for number, policy in enumerate(assigned.policies):
            choice = assigned.choice  # by node: the last one is that of the undrafted token
            judged = drafted if choice is None else drafted & (choice[:, :width] == number)
            q_rows, p_rows, tokens = q[:, :width][judged], p[judged], ids[judged]
            phi[judged] = policy.acceptance(q_rows, p_rows, tokens[:, None])[:, 0]
            recovered[judged] = policy.residual(q_rows, p_rows, tokens)
            emitted[judged] = policy.emitted(q_rows, p_rows)
        ones = torch.ones_like(q[:, :1, 0])
        alive = torch.cat([ones, phi.cumprod(-1)], -1)
        stop = alive * torch.cat([1 - phi, ones], -1)  # φ is 0 beyond a draft, so it stops there
        last = torch.cat([recovered, torch.zeros_like(q[:, :1])], 1)
        batch = torch.arange(len(ids), device=ids.device)
        last[batch, counts] = undrafted(assigned, q, counts)  # where all tokens were accepted
        return VerdictLaw(stop, last, alive, emitted)


def verify_chain(
    policy: str | Policy | Sequence[str | Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Accept each text's drafted tokens up to the first rejection, then emit one more token.

    A text is one row of the batch; its coins are uniform random numbers on [0, 1). Drafted token n
    at position i is accepted iff coin i is below the policy's acceptance probability φ(n). After
    the first rejection a recovered token is drawn from the policy's residual distribution. If all
    drafted tokens are accepted, a bonus token is drawn from the target row after them, or from the
    row that the policy puts in its place (``Policy.undrafted``).

    Parameters
    ----------
    policy : one policy or spec, or a list of one per text.
    target_probs : (B, K + 1, V) target rows, the last one for the bonus token.
    draft_probs : (B, K, V) draft rows, or None if the draft was deterministic.
    draft_token_ids : (B, K) int64; −1 ends a text's draft, and draft rows after it are not read.
    generator : one torch.Generator, or one per text (a text then behaves as if alone).
    coins : (accept (B, K), draw (B,)) in [0, 1), which fix every choice; instead of a generator.
    validate : check values and divide rows by their float64 sum. If False, neither is done. A row
        with NaN that has to decide a token, or a row without mass that a token has to be drawn
        from, still raises; on CUDA, where no value is read on the host, the token is −1 instead.

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary,
        both coins and a generator.
    TypeError
        Ids that are not int64, a policy that is neither a policy nor a spec.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]])
    >>> coins = torch.tensor([[0.3, 0.5]]), torch.tensor([0.7])  # φ is 1, then 2/9
    >>> step = ct.verify_chain("speculative", q, p, torch.tensor([[0, 0]]), coins=coins)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[ 0,  1, -1]]), tensor([1]))
    """
    return verify_tensors(
        Chain(), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )


def chain_on_device(
    assigned: Assignment, q: Targets, draft: Draft, accept: Accept, draw: Draws
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
    """Return each text's number of accepted tokens, and the token after them, both (B,).

    φ is computed for all drafted tokens at once, and one residual per text, after its first
    rejection. If q or p of a drafted token is NaN, its coin cannot be compared: the text's accepted
    tokens end before this token, and the next token is −1.
    """
    assigned, q = assigned.seen(q)
    ids, p, width = draft.token_ids, draft.probs, draft.token_ids.shape[1]
    if not width:
        zeros = ids.new_zeros(len(ids))  # no token is accepted, and every text is at node 0
        return zeros, pick(undrafted(assigned, q, zeros), draw)
    lengths = torch.as_tensor(draft.counts, device=ids.device)
    q_n = q[:, :width].gather(-1, ids[..., None])[..., 0].double()
    p_n = torch.ones_like(q_n) if p is None else p.gather(-1, ids[..., None])[..., 0].double()
    phi = [_acceptance(policy, q[:, :width], p, ids, (q_n, p_n)) for policy in assigned.policies]
    decidable = ~(q_n + p_n).isnan()
    drafted = torch.arange(width, device=ids.device) < lengths[:, None]
    passed = (accept < assigned.chosen(phi, slice(None), slice(width))) & decidable & drafted
    accepted = passed.long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    # a text without a rejected token gets some other place, whose residual is not used
    rejected = (batch, accepted.clamp(max=width - 1))
    tokens, q_rows = ids[rejected], q[rejected]
    p_rows = one_hot(tokens, q_rows) if p is None else p[rejected]
    residuals = [policy.residual(q_rows, p_rows, tokens) for policy in assigned.policies]
    recovered = assigned.chosen(residuals, *rejected)
    undrafted_rows = undrafted(assigned, q, accepted)
    rows = torch.where((accepted < lengths)[:, None], recovered, undrafted_rows.to(recovered.dtype))
    undecided = (accepted < lengths) & ~decidable[rejected]
    return accepted, torch.where(undecided, NO_TOKEN, pick(rows, draw))


def _acceptance(
    policy: Policy, q: Tensor, p: Tensor | None, ids: Tensor, entries: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch K"]:
    """Return φ of drafted tokens; an ``Entrywise`` policy reads only ``entries``, q_n and p_n."""
    if isinstance(policy, Entrywise):
        return policy.acceptance_of(*entries)
    p = one_hot(ids, q) if p is None else p
    return policy.acceptance(q, p, ids[..., None])[..., 0]
