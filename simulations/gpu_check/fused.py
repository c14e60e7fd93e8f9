"""The fused verification kernels as the timings call them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import cactus_theory as ct

from .sections import optional

KERNELS = "cactus_theory.kernels"
# a text's place in its stream of random numbers, from which a timed step goes on
POSITION = 100


def fused_step(rule: ct.Policy, verifier: str, given: Any) -> Callable[[], Any] | None:
    """Return one call of the fused kernel, in memory of its own; None where there is none.

    On a CPU kernels are there only while Triton interprets them.
    """
    known = optional(KERNELS, "has_kernel")
    ids = given.draft_token_ids
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if known is None or not known(rule, verifier) or not (ids.is_cuda or interpreted):
        return None
    verify, memory, verdict = (_there(name) for name in
                               ("verify_logits", "Workspace", "LogitsVerdict"))  # fmt: skip
    batch, width = ids.shape
    fixed = {
        "seeds": torch.arange(batch, device=ids.device),
        "positions": given.positions,
        "workspace": memory(batch, width, given.target_logits.shape[-1], ids.device),
        "out": verdict(ids.new_empty(batch, width + 1), ids.new_empty(batch)),
        "verifier": verifier,
    }
    return lambda: verify(rule, given.target_logits, given.draft_logits, ids, **fixed)


def _there(name: str) -> Callable[..., Any]:
    found = optional(KERNELS, name)
    assert found is not None
    return found
