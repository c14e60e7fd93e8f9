"""Check rows, ids, coins and policies for ``verify_chain``, ``verify_block``, ``verify_tree``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from cactus_theory.base import tensors
from cactus_theory.base.copies import called
from cactus_theory.base.threads import one_thread
from cactus_theory.policies import Policy, read_policy
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict
from cactus_theory.verify.draw import NO_TOKEN, Coins, Generators, toss


@one_thread()
def verify_tensors(
    verifier: Verifier,
    policy: Any,
    target_probs: Any,
    draft_probs: Any,
    draft_token_ids: Any,
    generator: Generators,
    coins: Coins | None,
    validate: bool,
    tree: Draft | None = None,
) -> Verdict:
    """Check the arguments of a ``verify_…`` function, then return the verifier's verdict.

    ``policy`` is one policy or spec, or one per text. A text's draft ends at −1. Drafts are chains,
    or have the shape that ``tree`` declares.
    """
    if coins is not None and generator is not None:
        raise ValueError("coins, generator: at most one may be given; got both")
    several = cast(Any, policy) if isinstance(policy, list | tuple) else [policy]
    policies = [each if isinstance(each, Policy) else read_policy(each) for each in several]
    tensors.check_tensor("draft_token_ids", draft_token_ids, "an int64 tensor", torch.int64)
    if validate:
        target_probs, draft_probs = _checked(
            policies, target_probs, draft_probs, draft_token_ids, generator, coins, tree
        )
    else:
        _check_ids(draft_token_ids, target_probs.shape[-1])
    for policy in policies:
        verifier.check(policy)
    if not len(draft_token_ids):  # an empty batch
        empty, path = draft_token_ids.new_zeros(0), None if tree is None else draft_token_ids
        return Verdict(draft_token_ids, num_accepted=empty, last=empty, path=path)
    rows = None if draft_probs is None else draft_probs.detach()
    if tree is None:
        drafted = draft_token_ids >= 0
        counts = drafted.sum(-1) if drafted.is_cuda else drafted.numpy().sum(-1).tolist()
        draft = Draft(draft_token_ids.clamp(min=0), counts, rows)
    else:
        draft = replace(tree, probs=rows)
    if coins is None:
        ids = draft_token_ids
        lengths = torch.as_tensor(draft.counts, device=ids.device)
        later_draws = None if tree is None else ids.new_tensor(draft.longest)
        coins = toss(lengths, ids.shape[1], generator, later_draws)
    accept, draw = coins
    assigned, q = assignment(policies, draft_token_ids).seen(target_probs.detach())
    verdict = verifier.verify(assigned, q, draft, accept, draw)
    last = [] if verdict.last.is_cuda else tensors.as_list(verdict.last)
    if NO_TOKEN in last:
        row = last.index(NO_TOKEN)
        rule = called(policies[row % len(policies)])  # rows are checked: the policy erred
        raise ValueError(
            f"{rule if validate else 'target_probs, draft_probs'}: rows that decide a token must "
            f"be distributions; got NaN, ∞ or no mass in row {row} of the batch, after "
            f"{int(verdict.num_accepted[row])} accepted tokens"
        )
    return verdict


def assignment(policies: Sequence[Policy], ids: Tensor) -> Assignment:
    """Return which policy judges each text, from one policy for all texts or one for each."""
    different: list[Policy] = []
    for policy in policies:
        if policy not in different:  # a function's policy need not be hashable
            different.append(policy)
    if len(different) == 1:
        return Assignment((different[0],))
    numbers = ids.new_tensor([different.index(policy) for policy in policies])
    return Assignment(tuple(different), numbers[:, None].expand(ids.shape))


def _checked(
    policies: list[Policy],
    target: Any,
    draft: Any,
    ids: Any,
    generator: Generators,
    coins: Coins | None,
    tree: Draft | None,
) -> tuple[Tensor, Tensor | None]:
    """Check shapes and values; return target and draft rows divided by their float64 sums.

    ``tree`` is the draft of :func:`verify_tree`; None for chains.
    """
    q = tensors.as_tensor("target_probs", target)
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
        raise ValueError(f"policy: must be one or one per row ({batch}); got {len(policies)}")
    sources = generator if isinstance(generator, list) else [generator]
    for source in sources:
        if generator is not None and not isinstance(source, torch.Generator):
            raise TypeError(
                f"generator: must be a torch.Generator or a list of them; got {source!r}"
            )
    if isinstance(generator, list) and len(generator) != batch:
        raise ValueError(
            f"generator: must be one or one per row ({batch}); got a list of {len(generator)}"
        )
    # in a tree of depth D up to D + 1 tokens are drawn from rows
    draws = () if tree is None else (max(map(max, tree.depths), default=0) + 1,)
    _check_coins(coins, (batch, width), (batch, *draws))
    _check_ids(ids, q.shape[-1])
    used = ids >= 0
    # target row 0 follows the text and row i + 1 follows drafted token i
    q = _normalised("target_probs", q, torch.nn.functional.pad(used, (1, 0), value=True))
    if draft is None:
        return q, None
    p = tensors.as_tensor("draft_probs", draft)
    tensors.check_pair(q, p, ("target_probs", "draft_probs"))
    shape = (batch, width, q.shape[-1])
    if p.shape != shape:
        raise ValueError(f"draft_probs: shape must be {shape}; got {tuple(p.shape)}")
    if tree is not None:  # draft rows are read only at nodes after which a token was sampled
        for used_of_text, place_by_node in zip(used, tree.first_after, strict=True):
            used_of_text[:] = False
            used_of_text[[*place_by_node]] = True
    return q, _normalised("draft_probs", p, used)


def _normalised(name: str, probs: Tensor, used: Tensor) -> Tensor:
    """Check rows of probabilities; return them in float64, divided by their sums.

    Rows at which ``used`` is False are not read, and become one-hot.
    """
    one_hot = probs.new_zeros(probs.shape[-1])
    one_hot[:1] = 1.0  # float16 has no 1/V for a large vocabulary
    rows = torch.where(used[..., None], probs, one_hot)
    tensors.check_probabilities(name, rows)
    return tensors.normalised(rows)


def _check_ids(ids: Tensor, vocab: int) -> None:
    if ids.is_cuda or not ids.numel():  # on CUDA no value is read on the host
        return
    table = ids.numpy()  # on a few ids numpy's passes take a fifth of torch's time
    least, most = int(table.min()), int(table.max())
    if least < -1 or most >= vocab:
        wrong = most if most >= vocab else least
        raise ValueError(f"draft_token_ids: must lie in [0, {vocab}) or be -1; got {wrong}")
    if least < 0 and ((table[:, 1:] >= 0) & (table[:, :-1] < 0)).any():
        raise ValueError("draft_token_ids: -1 must end a row's draft; got a token after a -1")


def _check_coins(coins: Sequence[Any] | Tensor | None, *shapes: tuple[int, ...]) -> None:
    if coins is None:
        return
    if not isinstance(coins, Sequence) or len(coins) != 2:
        raise TypeError(f"coins: must be two tensors, accept and draw; got {type(coins).__name__}")
    for name, coin, shape in zip(("accept", "draw"), coins, shapes, strict=True):
        if not isinstance(coin, Tensor):
            raise TypeError(f"coins: {name} must be a tensor; got {type(coin).__name__}")
        if tuple(coin.shape) != shape:
            raise ValueError(f"coins: {name} must have shape {shape}; got {tuple(coin.shape)}")
        if not coin.is_cuda and bool(((coin < 0) | (coin >= 1) | coin.isnan()).any()):
            raise ValueError(f"coins: {name} must lie in [0, 1); got {tensors.as_list(coin)}")
