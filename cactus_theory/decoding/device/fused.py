"""Verification of a round by the fused kernels.

The kernels make their coins and noise of a seed, a position, a place and a stream (see
``cactus_theory/kernels/_streams.py``). Here the seed of a text is the first number of its own
stream of coins, and the position is its length before the round, which grows in every round. So
no number is used twice, a text gets the same ones in every batch, and they are independent of
the later numbers of the stream, by which the loop draws the draft.
"""

from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from cactus_theory.decoding.device.verify import Logits, VerifyStep
from cactus_theory.kernels import LogitsVerdict, Workspace, has_kernel, verify_logits
from cactus_theory.kernels._layout import LOGITS
from cactus_theory.kernels.logits import runs_kernels
from cactus_theory.policies import Policy
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import Verdict, Verifier


def kernel_step(
    policy: Policy,
    verifier: str,
    seeds: Int[Tensor, "batch"],
    temperature: float,
    width: int,
    vocab: int,
) -> VerifyStep:
    """Return the step that decides every text's draft by one policy, in memory taken once.

    Its verdict is overwritten by the next round. Under ``block`` it has the alive ratios that
    the meter needs: the kernels follow them down the whole draft.

    Parameters
    ----------
    verifier : ``chain`` or ``block``.
    seeds : one per text, on the device.
    width, vocab : K and V.
    """
    batch = len(seeds)
    work = Workspace(batch, width, vocab, seeds.device)
    out = LogitsVerdict(seeds.new_empty(batch, width + 1), seeds.new_empty(batch))
    alive = work.alive.view(batch, width) if verifier == "block" and width else None

    def step(given: Logits) -> Verdict:
        ids, counts = verify_logits(
            policy,
            given.target,
            given.draft,
            given.token_ids,
            seeds=seeds,
            positions=given.positions.contiguous(),
            temperature=temperature,
            lengths=given.drafted.contiguous(),
            verifier=verifier,
            workspace=work,
            out=out,
        )
        last = ids.gather(1, counts[:, None])[:, 0]
        return Verdict(given.token_ids, counts, last, alive=alive)

    return step


def obstacle(
    policies: tuple[Policy, ...], verifier: Verifier, models: list[Any], device: torch.device
) -> str | None:
    """Return why the kernels cannot verify this decode, None if they can."""
    policy, *others = policies
    if others:
        return "where texts have different policies"
    # a subclass may decide otherwise
    if type(verifier) not in (Chain, Block) or not has_kernel(policy, verifier.spec):
        return f"as {policy.spec} has no kernel for {verifier.spec}"
    for model in models:
        if model.lm_head.weight.dtype not in LOGITS:
            return f"where logits are {str(model.lm_head.weight.dtype).removeprefix('torch.')}"
    if find_spec("triton") is None:
        return "as Triton is not installed (extra kernels)"
    if not runs_kernels(device):
        return f"as kernels do not run on {device.type} (with TRITON_INTERPRET=1 they do)"
    return None
