"""Kernels against the float64 closed forms, by the same random numbers, and their laws.

Every function takes a device and returns plain rows for a report. Without CUDA they run where
Triton interprets kernels (TRITON_INTERPRET=1), a tenth of a second a request.
"""

from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.kernels import verify_logits

from ._reference import compare, rows_of, sharp_seeds
from .kernel_laws import kernel_laws, kernel_streams, zero_tokens

__all__ = ["kernel_agreement", "kernel_laws", "kernel_streams", "zero_tokens"]

# every kind of kernel, token by token and in blocks
CHAIN = (
    "speculative", "lenience:lenience=0.5", "distillspec:epsilon=0.5,form=exp",
    "mixture:alpha=0.3", "cactus:delta=0.5", "cactus_exact:delta=0.3", "band:price=2",
    "band:price=0.5",
)  # fmt: skip
BLOCK = ("speculative", "band:price=2")
RULES = (*((spec, "chain") for spec in CHAIN), *((spec, "block") for spec in BLOCK))
KINDS = ("smooth", "spiky", "tied", "masked", "certain", "alike", "equal", "low")
WIDTH = 4
# logits of one batch: 2^27 float32 numbers are 512 MiB, and the closed forms hold several such
MOST_LOGITS = 2**25


def kernel_agreement(
    device: str, rows: int, vocabularies: tuple[int, ...], seed: int
) -> list[dict[str, Any]]:
    """Return one row a vocabulary, policy and verifier: mismatches must be 0.

    ``rows`` is how many requests each combination tries; each has WIDTH drafted tokens.
    """
    found = []
    for vocab in vocabularies:
        generator = torch.Generator(device=device).manual_seed(seed + vocab)
        most = max(len(KINDS), MOST_LOGITS // (vocab * (2 * WIDTH + 1)))
        for spec, verifier in RULES:
            counted = {"rows": 0, "excluded": 0, "mismatches": 0}
            for start in range(0, rows, most):
                batch = min(most, rows - start)
                for name, count in _agree(spec, verifier, batch, vocab, generator).items():
                    counted[name] += count
            found.append(
                {
                    "check": f"kernel {verifier} against the closed form", "vocabulary": vocab,
                    "policy": spec, **counted, "passed": not counted["mismatches"],
                }
            )  # fmt: skip
    return found


def _agree(
    spec: str, verifier: str, batch: int, vocab: int, generator: torch.Generator
) -> dict[str, int]:
    rule, device = ct.policy(spec), generator.device
    target, draft = logits(batch, WIDTH, vocab, generator)
    ids = drawn(draft, generator)
    rows, positions = rows_of(target, draft, ids), torch.arange(batch, device=device)
    seeds = sharp_seeds(rule, verifier, rows, positions, generator)
    found = verify_logits(
        rule, target, draft, ids, seeds=seeds, positions=positions, verifier=verifier
    )
    return compare(rule, verifier, rows, seeds, positions, found)


def logits(batch: int, width: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return target (B, K + 1, V) and draft (B, K, V) logits of every kind in turn."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    target, draft = normal(batch, width + 1, vocab), normal(batch, width, vocab)
    for number, kind in enumerate(KINDS):
        own = slice(number, None, len(KINDS))
        q, p = target[own], draft[own]
        common = q[:, :width]
        if kind == "spiky":
            q.mul_(6)
            p.mul_(6).add_(common, alpha=0.5)
        elif kind == "tied":
            q.round_()
            p.round_()
        elif kind == "masked":
            q.masked_fill_(normal(*q.shape) > 0.5, -torch.inf)
            q[..., 0] = 0.0
            p.masked_fill_(normal(*p.shape) > 1.0, -torch.inf)
            p[..., -1] = 0.0
        elif kind == "certain":
            q[..., vocab // 2] += 40.0
            p[..., vocab // 3] += 40.0
        elif kind == "alike":
            p.mul_(0.5).add_(common)
        elif kind == "equal":
            p.copy_(common)
        elif kind == "low":
            q.mul_(2).sub_(1e4)
            p.mul_(2).add_(1e4)
    return target, draft


def drawn(draft: Tensor, generator: torch.Generator) -> Tensor:
    """Return one token from each draft row, by torch's own generator."""
    flat = draft.reshape(-1, draft.shape[-1])
    uniform = torch.rand(flat.shape, generator=generator, device=flat.device)
    noise = -torch.log(-torch.log(uniform.clamp(min=1e-30)).clamp(min=1e-30))
    return (flat + noise).argmax(-1).view(draft.shape[:2])
