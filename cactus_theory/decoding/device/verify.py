"""Verification of one round from logits: the seam for fused kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory._scores import greedy, scaled
from cactus_theory.verify._chain_device import chain_on_device
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Assignment, Draft, Verdict, Verifier
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class Logits:
    """What a round knows before it verifies; all on the device.

    Attributes
    ----------
    target, draft : (B, K + 1, V) and (B, K, V) logits as the models gave them; no draft logits
        where the draft was certain, as it is at temperature 0.
    token_ids : (B, K) drafted tokens, of which the first ``drafted`` (B,) of a row count.
    accept, draw : (B, C) and (B,) the verifier's coins.
    positions : (B,) tokens of each text before the drafted ones, for kernels that make coins
        of a seed and a position.
    """

    target: Float[Tensor, "batch K1 vocab"]
    draft: Float[Tensor, "batch K vocab"] | None
    token_ids: Int[Tensor, "batch K"]
    drafted: Int[Tensor, "batch"]
    accept: Float[Tensor, "batch coins"]
    draw: Float[Tensor, "batch"]
    positions: Int[Tensor, "batch"]


# how a round is verified; the temperature is the step's own affair
VerifyStep = Callable[[Logits], Verdict]


def probabilities(
    logits: Float[Tensor, "*rows vocab"], temperature: float
) -> Float[Tensor, "*rows vocab"]:
    """Return softmax(logits / temperature), at least float32; one-hot at temperature 0."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature == 0:
        return greedy(logits)
    return (scaled(logits, temperature) if temperature != 1 else logits).softmax(-1)


def torch_step(verifier: Verifier, assigned: Assignment, temperature: float) -> VerifyStep:
    """Return the step that PyTorch's own kernels make of a verifier and its policies."""

    def step(given: Logits) -> Verdict:
        ids, q = given.token_ids, probabilities(given.target, temperature)
        if not ids.shape[1]:
            return Verdict(ids, torch.zeros_like(given.drafted), pick(q[:, 0], given.draw))
        p = None if given.draft is None else probabilities(given.draft, temperature)
        draft, coins = Draft(ids, given.drafted, p), (given.accept, given.draw)
        if type(verifier) is Chain:
            return Verdict(ids, *chain_on_device(assigned, q, draft, *coins))
        return verifier.verify(assigned, q, draft, *coins)

    return step
