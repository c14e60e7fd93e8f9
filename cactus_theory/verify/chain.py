"""Verify one chain of drafted tokens per row, token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.verify._chain_device import chain_on_device
from cactus_theory.verify._chain_host import ChainOnHost
from cactus_theory.verify.contract import (
    Assignment,
    Draft,
    Verdict,
    Verifier,
    register_verifier,
)
from cactus_theory.verify.draw import Coins, Generators, pick, toss

ChainVerdict = Verdict


@register_verifier("chain")
class Chain(Verifier):
    """Token n at place i is kept iff its coin < φ(n), up to the first refusal.

    After it one token comes from the policy's recovery law; if all were kept, from the target
    row that follows them. Needs only φ and g of a policy.
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
    validate : check values and divide rows by their float64 sum; False does neither.

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary.
    TypeError
        Ids that are not int64, rows of different dtypes, a rule that is not a Policy.
    """
    policies = [rule] if isinstance(rule, Policy) else list(rule)
    if validate:
        target_probs, draft_probs = _checked(
            policies, target_probs, draft_probs, draft_token_ids, generator, coins
        )
    valid = draft_token_ids >= 0
    lengths = valid.sum(-1)
    accept, draw = coins if coins is not None else toss(lengths, valid.shape[1], generator)
    draft = Draft(draft_token_ids.clamp(min=0), lengths, draft_probs)
    return Chain().verify(_assigned(policies, draft_token_ids), target_probs, draft, accept, draw)


def _assigned(policies: list[Policy], ids: Tensor) -> Assignment:
    """Return one policy for everything, or the different ones with the rows they judge."""
    different: list[Policy] = []
    for policy in policies:
        if policy not in different:  # one made of a function need not be hashable
            different.append(policy)
    if len(different) == 1:
        return Assignment((different[0],))
    own = ids.new_tensor([different.index(policy) for policy in policies])
    return Assignment(tuple(different), own[:, None].expand(ids.shape))


def _checked(
    policies: list[Policy],
    target: Any,
    draft: Any,
    ids: Any,
    generator: Generators,
    coins: Coins | None,
) -> tuple[Tensor, Tensor | None]:
    """Return float64 normalised rows, or raise."""
    for policy in policies:
        if not isinstance(policy, Policy):
            raise TypeError(f"rule: must be a Policy or a list of them; got {policy!r}")
    q = check.as_tensor("target_probs", target)
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"draft_token_ids: must be an int64 tensor; got {found}")
    if ids.ndim != 2 or q.ndim != 3:
        raise ValueError(
            "draft_token_ids, target_probs: shapes must be (B, K) and (B, K + 1, V); "
            f"got {tuple(ids.shape)} and {tuple(q.shape)}"
        )
    batch, width = ids.shape
    if q.shape[:2] != (batch, width + 1):
        raise ValueError(
            f"target_probs: shape must be ({batch}, {width + 1}, V) for draft_token_ids "
            f"{tuple(ids.shape)}; got {tuple(q.shape)}"
        )
    if len(policies) not in (1, batch):
        raise ValueError(f"rule: must be one rule or one per row ({batch}); got {len(policies)}")
    if isinstance(generator, list) and len(generator) != batch:
        raise ValueError(
            f"generator: must be one or one per row ({batch}); got a list of {len(generator)}"
        )
    _check_coins(coins, batch, width)
    _check_ids(ids, q.shape[-1])
    used = torch.nn.functional.pad(ids >= 0, (1, 0), value=True)
    q = _normalised("target_probs", q, used)
    if draft is None:
        return q, None
    p = check.as_tensor("draft_probs", draft)
    check.check_pair(check.as_tensor("target_probs", target), p, ("target_probs", "draft_probs"))
    if p.shape != (batch, width, q.shape[-1]):
        raise ValueError(
            f"draft_probs: shape must be {(batch, width, q.shape[-1])}; got {tuple(p.shape)}"
        )
    return q, _normalised("draft_probs", p, ids >= 0)


def _normalised(name: str, probs: Tensor, used: Tensor) -> Tensor:
    """Return float64 rows; rows that are not ``used`` are replaced, unread, by uniform ones."""
    rows = torch.where(used[..., None], probs, 1 / probs.shape[-1])
    check.check_probabilities(name, rows)
    return check.normalised(rows)


def _check_ids(ids: Tensor, vocab: int) -> None:
    if ids.is_cuda or not ids.numel():
        return
    outside = (ids < -1) | (ids >= vocab)
    if bool(outside.any()):
        raise ValueError(
            f"draft_token_ids: must lie in [0, {vocab}) or be -1; got {int(ids[outside][0])}"
        )
    if bool(((ids[:, 1:] >= 0) & (ids[:, :-1] < 0)).any()):
        raise ValueError("draft_token_ids: -1 must end a row's draft; got a token after a -1")


def _check_coins(coins: Coins | None, batch: int, width: int) -> None:
    if coins is None:
        return
    for name, coin, shape in zip(
        ("accept", "draw"), coins, ((batch, width), (batch,)), strict=True
    ):
        if tuple(coin.shape) != shape:
            raise ValueError(f"coins: {name} must have shape {shape}; got {tuple(coin.shape)}")
        if not coin.is_cuda and bool(((coin < 0) | (coin >= 1) | coin.isnan()).any()):
            raise ValueError(f"coins: {name} must lie in [0, 1); got {coin.tolist()}")
