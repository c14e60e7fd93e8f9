"""Certain drafts whose policy looks ahead: h_n of every drafted token, from the drafted entries."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.verify.contract import Assignment, Draft


def looked_ahead(
    assigned: Assignment, q: Float[Tensor, "batch K1 vocab"], draft: Draft
) -> list[Tensor | None]:
    """Return h_n (B, K) under each policy; None where it does not look ahead."""
    if draft.probs is not None:
        return [None] * len(assigned.policies)
    ids = draft.token_ids
    q_n = q[:, : ids.shape[1]].gather(-1, ids[..., None])[..., 0].double()
    counts = torch.as_tensor(draft.counts, device=ids.device)
    return [policy.certain_path(q_n, counts) for policy in assigned.policies]


def as_assigned(raised: list[Tensor | None], assigned: Assignment) -> Tensor | None:
    """Return (B, K) h_n under the policy of each token, NaN where it does not look ahead."""
    known = [own for own in raised if own is not None]
    if not known:
        return None
    if assigned.choice is None:
        return raised[0]
    found = torch.full_like(known[0], math.nan)
    for number, own in enumerate(raised):
        if own is not None:
            found = torch.where(assigned.choice == number, own, found)
    return found
