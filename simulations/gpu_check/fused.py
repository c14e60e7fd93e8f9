"""The fused verification kernels as the timings call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cactus_theory as ct

from .sections import optional

KERNELS = "cactus_theory.kernels"


def fused_step(rule: ct.Policy, verifier: str, given: Any) -> Callable[[], Any] | None:
    """Return one call of the fused kernel, None where this policy and verifier have none."""
    known, verify = optional(KERNELS, "has_kernel"), optional(KERNELS, "verify_logits")
    if known is None or verify is None or not known(rule, verifier):
        return None
    ids = given.draft_token_ids
    batch, width = ids.shape
    seeds = torch.arange(batch, device=ids.device)
    positions = torch.zeros_like(seeds)
    return lambda: verify(
        rule,
        given.target_logits,
        given.draft_logits,
        ids,
        temperature=1.0,
        seeds=seeds,
        positions=positions,
        verifier=verifier,
    )
