"""Verify one chain of drafted tokens per row, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies import Policy
from cactus_theory.verify._draw import Coins, Generators, pick, toss
from cactus_theory.verify._step import decide, settle


@dataclass(frozen=True)
class ChainVerdict:
    """What a verification step emits.

    Attributes
    ----------
    output_token_ids : (B, K + 1) int64, per row the accepted tokens, then one recovered or
        bonus token, then −1.
    num_accepted : (B,) int64, without the recovered or bonus token.
    """

    output_token_ids: Int[Tensor, "batch width"]
    num_accepted: Int[Tensor, "batch"]


def verify_chain(
    rule: Policy | Sequence[Policy],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    *,
    generator: Generators = None,
    coins: Coins | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """Keep drafted tokens up to the first rejection, then emit one more token per row.

    Token n at position i is kept iff its coin < φ(n). After the first rejection the token
    comes from the rule's recovery law; if all were kept, from the target row behind them.

    Parameters
    ----------
    rule : one policy, or one per row.
    target_probs : (B, K + 1, V) target rows, the last one for the bonus token.
    draft_probs : (B, K, V) draft rows, or None if the draft was certain of its tokens.
    draft_token_ids : (B, K) int64; −1 ends a row's draft, and rows behind it are not read.
    generator : one torch.Generator, or one per row (a row then behaves as if alone).
    coins : (accept (B, K), draw (B,)) in [0, 1) instead of a generator: every choice fixed.
    validate : check values and divide rows by their float64 sum; False trusts the caller.

    Raises
    ------
    ValueError
        Shapes that do not match, rows that are not distributions, ids outside the vocabulary.
    TypeError
        Ids that are not int64, rows of different dtypes, a rule that is not a Policy.
    """
    rules = [rule] if isinstance(rule, Policy) else list(rule)
    if validate:
        target_probs, draft_probs = _checked(
            rules, target_probs, draft_probs, draft_token_ids, generator, coins
        )
    valid = draft_token_ids >= 0
    lengths = valid.sum(-1)
    accept, draw = coins if coins is not None else toss(lengths, valid.shape[1], generator)
    if len(rules) == 1:
        return _verify(rules[0], target_probs, draft_probs, draft_token_ids, lengths, accept, draw)
    parts = []
    for row, own in enumerate(rules):
        one = slice(row, row + 1)
        p = None if draft_probs is None else draft_probs[one]
        parts.append(
            _verify(
                own,
                target_probs[one],
                p,
                draft_token_ids[one],
                lengths[one],
                accept[one],
                draw[one],
            )
        )
    outputs, counts = zip(*((v.output_token_ids, v.num_accepted) for v in parts), strict=True)
    return ChainVerdict(torch.cat(outputs), torch.cat(counts))


def _verify(
    rule: Policy,
    q: Float[Tensor, "batch K1 vocab"],
    p: Float[Tensor, "batch K vocab"] | None,
    ids: Int[Tensor, "batch K"],
    lengths: Int[Tensor, "batch"],
    accept: Float[Tensor, "batch K"],
    draw: Float[Tensor, "batch"],
) -> ChainVerdict:
    """Decide one rule's rows; ``p`` and ``q`` are read at drafted tokens and one row each."""
    width = ids.shape[1]
    if not width:
        return ChainVerdict(pick(q[:, 0], draw)[:, None], torch.zeros_like(lengths))
    drafted = None if ids.is_cuda else lengths.tolist()
    decision = decide(rule, q[:, :width], p, ids.clamp(min=0), accept, drafted)
    return ChainVerdict(*settle(decision, q, ids, lengths, accept, draw))


def _checked(
    rules: list[Policy],
    target: Any,
    draft: Any,
    ids: Any,
    generator: Generators,
    coins: Coins | None,
) -> tuple[Tensor, Tensor | None]:
    """Return float64 normalised rows, or raise."""
    for rule in rules:
        if not isinstance(rule, Policy):
            raise TypeError(f"rule: must be a Policy or a list of them; got {rule!r}")
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
    if len(rules) not in (1, batch):
        raise ValueError(f"rule: must be one rule or one per row ({batch}); got {len(rules)}")
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
        raise ValueError("draft_token_ids: -1 must end a row's draft; got a token behind a -1")


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
