"""Verification of one round from logits: the seam for fused kernels."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.verify._chain_device import chain_on_device
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Assignment, Draft, Verdict, Verifier
from cactus_theory.verify.draw import pick

# (target_logits (B, K + 1, V), draft_logits (B, K, V) or None where the draft was certain,
# token_ids (B, K), lengths (B,): how many of them count, accept (B, C), draw (B,)) → the verdict.
# Logits are those of the models; a step applies the temperature itself.
VerifyStep = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Verdict]


def probabilities(
    logits: Float[Tensor, "*rows vocab"], temperature: float
) -> Float[Tensor, "*rows vocab"]:
    """Return softmax(logits / temperature), at least float32; one-hot at temperature 0."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return (logits / temperature if temperature != 1 else logits).softmax(-1)


def torch_step(verifier: Verifier, assigned: Assignment, temperature: float) -> VerifyStep:
    """Return the step that PyTorch's own kernels make of a verifier and its policies."""

    def step(
        target_logits: Float[Tensor, "batch K1 vocab"],
        draft_logits: Float[Tensor, "batch K vocab"] | None,
        token_ids: Int[Tensor, "batch K"],
        lengths: Int[Tensor, "batch"],
        accept: Float[Tensor, "batch coins"],
        draw: Float[Tensor, "batch"],
    ) -> Verdict:
        q = probabilities(target_logits, temperature)
        if not token_ids.shape[1]:
            return Verdict(token_ids, torch.zeros_like(lengths), pick(q[:, 0], draw))
        p = None if draft_logits is None else probabilities(draft_logits, temperature)
        draft = Draft(token_ids, lengths, p)
        if type(verifier) is Chain:
            return Verdict(token_ids, *chain_on_device(assigned, q, draft, accept, draw))
        return verifier.verify(assigned, q, draft, accept, draw)

    return step
