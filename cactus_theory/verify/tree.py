r"""Verify a tree of drafted tokens, sampled or deterministic, by one walk from node to node.

A node may have deterministic children, which the text above them fixes, and at most one child that
was sampled from a row r. From the current node on, the run of sampled children is verified as a
block. At each node h is computed from q and the selection law p°, a row that depends on r and on
the deterministic children, but not on the sampled token. If the token drawn after the accepted run
is a drafted child, the walk goes on at this child; else the round ends. No other rule makes the
next token a drafted child more often (THEORY.md, Theorems 21, 22).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base.tensors import as_list, check_tensor
from cactus_theory.policies import Policy
from cactus_theory.verify.block import Block
from cactus_theory.verify.checks import verify_tensors
from cactus_theory.verify.contract import register_verifier
from cactus_theory.verify.draft import Accept, Assignment, Draft, Draws, Targets, Verdict
from cactus_theory.verify.draw import Coins, Generators
from cactus_theory.verify.walk import Descent, Walk, index_of


@register_verifier("tree")
class Tree(Block):
    """Walk down a tree of deterministic and sampled tokens; runs of sampled tokens are blocks."""

    drafts = ("chain", "tree")

    def draws(self, depth: int) -> int:
        """Return depth + 1: each draw that gives a drafted child is followed by another draw."""
        return depth + 1

    def verify(
        self, assigned: Assignment, target_probs: Targets, draft: Draft, accept: Accept, draw: Draws
    ) -> Verdict:
        """Return the verdict. Rows are read on the CPU, only at the nodes that the walk visits.

        Raises ValueError for a tree that does not declare which tokens were sampled, or that has
        two tokens sampled after one node.
        """
        draws = draw[:, None] if draw.ndim == 1 else draw
        if draft.is_chain:
            return super().verify(assigned, target_probs, draft, accept, draws[:, 0])
        if draft.sampled is None:
            raise ValueError(
                f"draft: a tree for verifier={self.spec!r} must declare which tokens were sampled; "
                "got sampled=None"
            )
        tensors = draft.probs, assigned.choice, assigned.target
        p, choice, target = (None if tensor is None else tensor.cpu() for tensor in tensors)
        draft = replace(draft, probs=p)
        on_host = replace(assigned, choice=choice, target=target)
        assigned, q = on_host.seen(target_probs.cpu())
        texts = enumerate(zip(as_list(accept), as_list(draws), strict=True))
        walks = [Descent(draft, row, coins=coins, draws=last) for row, (coins, last) in texts]
        walking = walks
        while walking:  # each pass judges one run of sampled tokens in every text that goes on
            runs = [walk.run() for walk in walking]
            Walk(self, assigned, q, draft, runs, index_of(runs)).backwards()
            walking = [walk for walk in walking if walk.goes_on()]
        ids, table = draft.token_ids, list[list[int]]()
        for walk in walks:  # by text: number and last token, and accepted places
            path = walk.accepted()
            padding = [-1] * (ids.shape[1] - len(path))
            table.append([len(path), walk.runs[-1].last, *path, *padding])
        columns = ids.new_tensor(table)
        accepted, last, path = columns[:, 0], columns[:, 1], columns[:, 2:]
        return Verdict(ids, num_accepted=accepted, last=last, path=path, paths=walks)


def declared_tree(
    ids: Any, parents: Any, draft_probs: Any, sampled: Any, deterministic: Any, validate: bool
) -> Draft:
    """Return the draft of the given trees, without draft rows, after checks of shapes and dtypes.

    With ``validate`` parents, siblings and sampled tokens are checked, too.
    """
    check_tensor("draft_token_ids", ids, "an int64 tensor", torch.int64)
    used = ids >= 0
    if sampled is None:
        sampled = torch.full_like(used, draft_probs is not None)
    flags = {"sampled": sampled}
    if deterministic is not None:
        flags["deterministic"] = deterministic
    for name, values in {"parents": parents, **flags}.items():
        dtype = torch.int64 if name == "parents" else torch.bool
        check_tensor(name, values, f"a tensor of {dtype}", dtype)
        if values.shape != ids.shape:
            raise ValueError(f"{name}: shape must be {tuple(ids.shape)}; got {tuple(values.shape)}")
    if validate:
        _check_family(ids, torch.where(used, parents, -1))
        if draft_probs is None and bool((sampled & used).any()):
            raise ValueError(
                "draft_probs: sampled tokens need the rows they were drawn from; got None"
            )
    return Draft(ids.clamp(min=0), as_list(used.sum(-1)), None, parents, **flags)


def _check_family(ids: Tensor, parents: Tensor) -> None:
    """Raise ValueError unless parents come before their children and siblings are different."""
    place = torch.arange(ids.shape[1], device=ids.device)
    if bool(((parents < -1) | (parents >= place)).any()):
        raise ValueError(f"parents: each must be −1 or an earlier token; got {as_list(parents)}")
    alike = (parents[:, :, None] == parents[:, None]) & (ids[:, :, None] == ids[:, None])
    equal = (alike & (ids >= 0)[:, None]).triu(1)
    if bool(equal.any()):
        row, first, second = as_list(equal.nonzero()[0])
        raise ValueError(
            "draft_token_ids: siblings must be different tokens; "
            f"got tokens {first} and {second} of row {row}"
        )


def verify_tree(
    policy: str | Policy | Sequence[str | Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    parents: Tensor,
    *,
    sampled: Tensor | None = None,
    deterministic: Tensor | None = None,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> Verdict:
    """Walk down each text's tree of drafted tokens, then emit one more token per text.

    Node 0 of a text is the text so far. Node i + 1 follows drafted token i: the text, then the
    tokens on the path to token i, then token i. At every node that is reached the next token has
    the policy's law h. The policy computes h from q and the selection law, a draft row that stands
    for all tokens drafted at the node (:func:`selection_law`).

    Parameters
    ----------
    policy : one policy or spec, or a list of one per text, as for :func:`verify_block`.
    target_probs : (B, K + 1, V) target rows by node.
    draft_probs : (B, K, V) by node, the row that the node's sampled child was drawn from; not read
        at nodes without a sampled child, and None if nothing was sampled.
    draft_token_ids : (B, K) int64; −1 ends a text's tree. Siblings are different tokens: a token
        that was sampled and is also deterministic is one node.
    parents : (B, K) int64, the earlier drafted token that each token follows, −1 for the text.
    sampled : (B, K) bool, the tokens drawn from their node's row, at most one a node; by default
        all tokens if ``draft_probs`` is given, else none.
    deterministic : (B, K) bool, the tokens that were fixed before the sampled sibling was drawn; by
        default all that were not sampled. A token with both flags False, such as one
        chosen after the sampled sibling was known, has no part in the selection law: it is accepted
        only if the token that is drawn equals it.
    generator : one torch.Generator, or one per text (a text then behaves as if alone).
    coins : (accept (B, K), draw (B, D + 1)) in [0, 1) for trees of depth D: a coin for each
        drafted token, and a coin for each token that is drawn from a row, in order.
    validate : check values and divide rows by their float64 sum. If False, neither is done, but
        a token that has to be drawn from a row that is no distribution still raises.

    Raises
    ------
    ValueError
        As :func:`verify_block`; parents that do not come before their children, equal siblings,
        two sampled siblings, sampled tokens without ``draft_probs``.
    TypeError
        Ids or parents that are not int64, flags that are not bool, a policy that is neither a
        policy nor a spec.

    Examples
    --------
    >>> q = torch.tensor([[[0.3, 0.3, 0.4], [0.2, 0.2, 0.6], [0.2, 0.2, 0.6]]])
    >>> ids, parents = torch.tensor([[0, 1]]), torch.tensor([[-1, -1]])  # two deterministic tokens
    >>> step = ct.verify_tree(ct.policy("speculative"), q, None, ids, parents,
    ...     coins=(torch.zeros(1, 2), torch.tensor([[0.5, 0.1]])))
    >>> step.output_token_ids, step.path  # 1 is drawn from the first row, then 0 from the third
    (tensor([[ 1,  0, -1]]), tensor([[ 1, -1]]))
    """
    tree = declared_tree(draft_token_ids, parents, draft_probs, sampled, deterministic, validate)
    shared = policy, target_probs, draft_probs, draft_token_ids, generator, coins, validate
    return verify_tensors(Tree(), *shared, tree=tree)
