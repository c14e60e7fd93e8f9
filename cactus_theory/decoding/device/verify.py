"""Verification of one round from logits, in PyTorch or by the fused kernels.

The kernels compute coins from a seed and counters (``cactus_theory/kernels/random_numbers.py``).
Here a text's seed is the first number of the text's NumPy generator, and a counter is the text's
length before the round, which grows in every round. So no coin is used twice, and a text gets the
same coins in every batch. These coins are also independent of the generator's later numbers, with
which the loop draws the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.rows import ORDINARY, greedy, scaled
from cactus_theory.kernels import LogitsVerdict, Workspace, has_kernel, verify_logits
from cactus_theory.kernels.buffers import LOGITS
from cactus_theory.kernels.logits import old_triton, runs_kernels
from cactus_theory.policies import Policy
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain, chain_on_device
from cactus_theory.verify.contract import Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict


@dataclass(frozen=True)
class Logits:
    """Logits and drafted tokens of a round before verification, all on the device.

    ``target`` and ``draft`` are the models' logits; ``draft`` is None for a deterministic draft, as
    at temperature 0. The first ``drafted`` tokens of a row are verified. ``accept`` and ``draw``
    are the verifier's coins; ``positions`` are the numbers of tokens of each text before the draft.
    """

    target: Float[Tensor, "batch K1 vocab"]
    draft: Float[Tensor, "batch K vocab"] | None
    token_ids: Int[Tensor, "batch K"]
    drafted: Int[Tensor, "batch"]
    accept: Float[Tensor, "batch coins"]
    draw: Float[Tensor, "batch"]
    positions: Int[Tensor, "batch"]


# function that applies the temperature and verifies a round
VerifyStep = Callable[[Logits], Verdict]


def probabilities(
    logits: Float[Tensor, "*rows vocab"], temperature: float
) -> Float[Tensor, "*rows vocab"]:
    """Return softmax(logits / temperature), in at least float32; one-hot at temperature 0."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature == 0:
        return greedy(logits)
    return (scaled(logits, temperature) if temperature != 1 else logits).softmax(-1)


def torch_step(verifier: Verifier, assigned: Assignment, temperature: float) -> VerifyStep:
    """Return the step that verifies a round in PyTorch, with a verifier and assigned policies."""

    def step(logits: Logits) -> Verdict:
        ids, q = logits.token_ids, probabilities(logits.target, temperature)
        if not ids.shape[1]:  # then every verifier draws from the rows of ``Policy.undrafted``
            empty = Draft(ids, logits.drafted, None)
            return Verdict(ids, *chain_on_device(assigned, q, empty, logits.accept, logits.draw))
        p = None if logits.draft is None else probabilities(logits.draft, temperature)
        draft, coins = Draft(ids, logits.drafted, p), (logits.accept, logits.draw)
        if type(verifier) is Chain:
            return Verdict(ids, *chain_on_device(assigned, q, draft, *coins))
        return verifier.verify(assigned, q, draft, *coins)

    return step


def kernel_step(
    policy: Policy,
    verifier: str,
    seeds: Int[Tensor, "batch"],
    temperature: float,
    width: int,
    vocab: int,
) -> VerifyStep:
    """Return the step that verifies a round by the fused kernels, with one policy for all texts.

    ``verifier`` is ``chain`` or ``block``; ``seeds`` are on the device; ``width`` and ``vocab`` are
    K and V. Memory is allocated once, and the next round overwrites the verdict. Under ``block``
    the verdict has the alive ratios P, which the meter needs.
    """
    batch = len(seeds)
    work = Workspace(batch, width, vocab, seeds.device)
    out = LogitsVerdict(seeds.new_empty(batch, width + 1), seeds.new_empty(batch))
    alive = work.block.alive if verifier == "block" and width else None

    def step(logits: Logits) -> Verdict:
        ids, counts = verify_logits(
            policy,
            logits.target,
            logits.draft,
            logits.token_ids,
            seeds=seeds,
            positions=logits.positions.contiguous(),
            temperature=temperature,
            lengths=logits.drafted.contiguous(),
            verifier=verifier,
            workspace=work,
            out=out,
        )
        last = ids.gather(1, counts[:, None])[:, 0]
        return Verdict(logits.token_ids, counts, last, alive=alive)

    return step


def obstacle(
    policies: tuple[Policy, ...],
    verifier: Verifier,
    models: list[Any],
    device: torch.device,
    temperature: float,
) -> str | None:
    """Return the reason why the kernels do not support this decode, None if they do."""
    policy, *others = policies
    if others:
        return "where texts have different policies"
    # a subclass of Chain or Block may verify differently from the kernels
    if type(verifier) not in (Chain, Block) or not has_kernel(policy, verifier.spec):
        return f"as {policy.spec} has no kernel for {verifier.spec}"
    for model in models:
        if model.lm_head.weight.dtype not in LOGITS:
            return f"where logits are {str(model.lm_head.weight.dtype).removeprefix('torch.')}"
    if temperature and not ORDINARY[0] <= temperature <= ORDINARY[1]:
        return f"as they do not divide by a temperature of {temperature:g}"
    if find_spec("triton") is None:
        return "as Triton is not installed (extra kernels)"
    if not runs_kernels(device):
        return f"as kernels do not run on {device.type} (with TRITON_INTERPRET=1 they do)"
    if (version := old_triton()) is not None:
        return f"as Triton {version} is older than 3.4"
    return None
