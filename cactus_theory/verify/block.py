r"""Block verification: a drafted path is verified as a whole, so no single coin can end it early.

Let x_1..x_K be the drafted tokens, h the row to be emitted at each node, and P_0 = 1. For i = 1..K

.. math:: P_i = \min\{1, P_{i-1} h(x_i)/p(x_i)\}, \qquad R_i = Σ_x (P_i h(x) − p(x))_+

where h and p in R_i are the rows after x_i. P_i is the alive ratio of node i. Each i has a coin, a
uniform random number. The coin passes if it is below R_i/(R_i + 1 − P_i) for i < K, and below P_K
for i = K. The number of accepted tokens is the last i whose coin passes, 0 if none does. After
i < K accepted tokens the next token is drawn from (P_i h − p)₊ normalised. After K accepted tokens
it is drawn from the target's row, or from the row that the policy puts in its place.

The token after a reached node has exactly the law h. Node x_1..x_i is reached with probability
p(x_1..x_i) P_i, the largest that any verifier of one drafted path can have for this h. Source: Sun
et al. 2024 (arXiv 2403.10444) for h = q; the same holds for any h that depends on the text and P
alone (THEORY.md, Theorem 12).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.policies.policy import normalised_or
from cactus_theory.verify.checks import verify_tensors
from cactus_theory.verify.contract import VerdictLaw, Verifier, register_verifier
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import Coins, Generators
from cactus_theory.verify.on_device import Blocks, block_on_device
from cactus_theory.verify.walk import Walk, chains


@register_verifier("block")
class Block(Verifier):
    """Verify each drafted path as a whole (:func:`verify_block`)."""

    reaches_all_it_can = by_path = True

    def check(self, policy: Policy) -> None:
        """Raise ValueError for a policy that is neither a ``FixedTarget`` nor a ``PerProposal``."""
        if type(policy).target is Policy.target:
            raise ValueError(
                f"verifier: {self.name} needs a policy with a row of its own, which "
                f"{policy.spec} has not: write it as f(q, p), which returns the row to emit, or "
                "let chain verify it"
            )

    def verify(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict. On a CPU a vocabulary row is read only if a decision needs it."""
        if draft.token_ids.is_cuda:
            return block_on_device(assigned, target_probs, draft, accept, draw)
        walk = Walk(self, assigned, target_probs, draft, *chains(draft, accept, draw))
        walk.backwards()
        return Verdict(draft.token_ids, *walk.accepted_and_last(), paths=walk.paths)

    def law(self, assigned: Assignment, target_probs: Targets, draft: Draft) -> VerdictLaw:
        """Return the exact law of the verdict on chains; NotImplementedError for a tree."""
        if not draft.is_chain:
            return super().law(assigned, target_probs, draft)
        blocks = Blocks(assigned, target_probs.double(), draft)
        # the path ends at node i iff the coin of node i passes and the coin of no later node does
        none_later = (1 - blocks.value[:, 1:]).flip(-1).cumprod(-1).flip(-1)
        stop = blocks.value * torch.cat([none_later, torch.ones_like(blocks.value[:, :1])], -1)
        last = normalised_or(blocks.last, torch.zeros_like(blocks.last))
        return VerdictLaw(stop, last, alive=blocks.alive, emitted=blocks.emitted)


def verify_block(
    policy: str | Policy | Sequence[str | Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Verify each text's drafted path as a whole, then emit one more token per text.

    In expectation at least as many tokens are accepted as by :func:`verify_chain`, for the same
    row h at every node. The next token at a node has the law h under both verifiers. The law of
    whole texts differs between the verifiers unless h = q: bonus tokens, which come from the
    target's row and not from h, occur at other positions.

    Parameters
    ----------
    policy : one policy or spec, or a list of one per text. Each policy must have a row h
        (``FixedTarget``) or be per proposal, such as Cactus, whose h is its emitted law.
    target_probs, draft_probs, draft_token_ids, generator, coins, validate : as for
        :func:`verify_chain`.

    Raises
    ------
    ValueError
        As :func:`verify_chain`; a policy that has no row h and is not per proposal.
    TypeError
        As :func:`verify_chain`.

    Examples
    --------
    >>> q = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    >>> p = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> coins = torch.tensor([[0.6, 0.9]]), torch.tensor([0.7])
    >>> ids = torch.tensor([[0, 0]])
    >>> ct.verify_block("speculative", q, p, ids, coins=coins).output_token_ids
    tensor([[0, 0, 1]])
    >>> ct.verify_chain("speculative", q, p, ids, coins=coins).output_token_ids
    tensor([[ 1, -1, -1]])
    """
    return verify_tensors(
        Block(), policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    )
