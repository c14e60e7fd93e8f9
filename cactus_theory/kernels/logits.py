"""Verify drafted tokens from logits, in a few kernels and without a table of probabilities."""

import os
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import warn_of_probabilities
from cactus_theory.kernels._layout import (
    Workspace,
    check_logits,
    check_per_request,
    checked_temperature,
    layout_of,
)
from cactus_theory.kernels._torch import draw_in_torch, verify_in_torch
from cactus_theory.kernels.rules import kernel_rule
from cactus_theory.policies import Policy

WHOLE = (torch.int64,)


class LogitsVerdict(NamedTuple):
    """What a step emits.

    Attributes
    ----------
    output_token_ids : (B, K + 1) int64: the accepted tokens, one recovered or bonus token, −1.
    num_accepted : (B,) int64, without the recovered or bonus token.

    Examples
    --------
    >>> LogitsVerdict(torch.tensor([[3, 1, -1]]), torch.tensor([1])).num_accepted
    tensor([1])
    """

    output_token_ids: Int[Tensor, "batch width"]
    num_accepted: Int[Tensor, "batch"]


def verify_logits(
    rule: Policy,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: float | Tensor = 1.0,
    lengths: Tensor | None = None,
    cu_num_draft_tokens: Tensor | None = None,
    width: int | None = None,
    verifier: str = "chain",
    workspace: Workspace | None = None,
    out: LogitsVerdict | None = None,
) -> LogitsVerdict:
    r"""Keep drafted tokens and draw one more per request, from raw logits.

    The law is that of :func:`cactus_theory.verify_chain` (``verify_block``) on softmax(l/T).
    The random numbers are functions of a request's seed and position (see
    ``cactus_theory/kernels/_streams.py``): a request emits the same tokens alone, in any batch
    and in both layouts.

    On a CUDA device, policies of :func:`has_kernel` run in a fixed sequence of launches: nothing
    is read on the host, no table of probabilities is written, and a step can be captured in a
    CUDA graph (run each shape once before; with ``workspace`` and ``out`` nothing is allocated).
    Probabilities are float32, those of drafted tokens float64. Every row is read once, then the
    row of the recovered or bonus token again. The band at a price also reads each row whose
    token lossless sampling refuses and the band may keep, all at once, up to the first token
    that no band keeps; and the refused row 2 to 4 times to solve it. A block reads the rows
    after the last certain node again, and on the band solves those of its path.

    All else takes softmax and the torch path in float64: the same law, but other tokens after a
    refusal (drawn by inversion), and it may wait for the device.

    Parameters
    ----------
    target_logits : (B, K + 1, V), the last row for the bonus token; or flat, (N + B, V), the
        rows of a request one after another with its bonus row last, as engines compute them.
        float32, bfloat16 or float16; strides are free but for V. −inf excludes a token.
    draft_logits : (B, K, V), or flat (N, V); None if the draft was certain of its tokens.
    draft_token_ids : (B, K) int64, −1 ends a request's draft; or flat, (N,). A token outside
        the vocabulary is refused.
    seeds : (B,) int64, one per request.
    positions : (B,) int64, how many tokens the request's text has before this step.
    temperature : one number, or (B,) float32, for target and draft. At 0 both rows are one-hot,
        the target's at its first largest logit, the draft's at its token.
    lengths : (B,) drafted tokens of each request, where −1 does not say it; not if flat.
    cu_num_draft_tokens : (B,) int32 or int64, running counts without a leading 0, if flat.
        ``width`` is then K, the most drafted tokens that a request has.
    verifier : ``chain`` or ``block`` (its bonus from the target).
    workspace, out : memory to work in and to write to.

    A target row that is no distribution (a NaN or +inf among its logits, or nothing but −inf)
    keeps no token, and −1 stands where the next one would: a step never emits an id outside the
    vocabulary. Values are not looked at on the host, so whoever reads the ids raises on a −1 at
    ``num_accepted``.

    Raises
    ------
    ValueError
        Shapes, devices or strides that do not match; values on the device are not looked at.
    TypeError
        Logits or ids of another dtype.
    ModuleNotFoundError
        On CUDA without Triton (extra ``kernels``).

    Examples
    --------
    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])  # one request, one drafted token
    >>> draft, ids = torch.tensor([[[0.0, 9.0]]]), torch.tensor([[1]])
    >>> at = {"seeds": torch.tensor([7]), "positions": torch.tensor([12])}
    >>> step = verify_logits(ct.policy("speculative"), target, draft, ids, **at, temperature=0)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[1, 0]]), tensor([1]))
    """
    layout = layout_of(
        target_logits, draft_logits, draft_token_ids, lengths, cu_num_draft_tokens, width
    )
    device = target_logits.device
    check_per_request(layout.batch, device, WHOLE, seeds=seeds, positions=positions)
    heat = checked_temperature(temperature, layout.batch, device)
    found = kernel_rule(rule, verifier)
    if found is None or not runs_kernels(device):
        if not target_logits.is_cuda and target_logits.numel():
            first = target_logits.reshape(-1, target_logits.shape[-1])[0]
            warn_of_probabilities("target_logits", first)
        ids, counts = verify_in_torch(
            rule, verifier, layout, target_logits, draft_logits, draft_token_ids, heat, seeds,
            positions,
        )  # fmt: skip
        return LogitsVerdict(ids, counts) if out is None else _copied(out, ids, counts)
    check.optional_module("triton", "kernels")
    from cactus_theory.kernels._launch import Step

    work = _workspace(workspace, layout.batch, layout.width, layout.vocab, device)
    if out is None:
        ids = draft_token_ids.new_empty(layout.batch, layout.width + 1)
        out = LogitsVerdict(ids, draft_token_ids.new_empty(layout.batch))
    Step(
        found, verifier == "block", layout, target_logits, draft_logits, draft_token_ids, heat,
        seeds, positions, work, *out,
    ).run()  # fmt: skip
    return out


def draft_from_logits(
    logits: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    place: int,
    temperature: float | Tensor = 1.0,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw a drafted token from each row of softmax(l/T), in one pass over the logits.

    The numbers come from a stream of their own, which :func:`verify_logits` does not use:
    ``positions`` are those of the step that will verify the draft, and ``place`` is 0 for its
    first token. At T = 0 the token is the first of the largest logit.

    Parameters
    ----------
    logits : (B, V), float32, bfloat16 or float16. −inf excludes a token.

    Returns
    -------
    (B,) int64; −1 where the row is no distribution: a NaN or +inf, or nothing but −inf.

    Raises
    ------
    ValueError, TypeError
        As for :func:`verify_logits`.
    ModuleNotFoundError
        On CUDA without Triton (extra ``kernels``).

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 9.0, 1.0]])
    >>> seeds, positions = torch.tensor([7]), torch.tensor([12])
    >>> draft_from_logits(logits, seeds=seeds, positions=positions, place=0, temperature=0)
    tensor([1])
    """
    check_logits("logits", logits)
    if logits.ndim != 2:
        raise ValueError(f"logits: shape must be (B, V); got {tuple(logits.shape)}")
    batch, vocab = logits.shape
    check_per_request(batch, logits.device, WHOLE, seeds=seeds, positions=positions)
    heat = checked_temperature(temperature, batch, logits.device)
    if not runs_kernels(logits.device):
        tokens = draw_in_torch(logits, heat, seeds, positions, place)
        return tokens if out is None else out.copy_(tokens)
    check.optional_module("triton", "kernels")
    from cactus_theory.kernels._launch import Drawing

    work = _workspace(workspace, batch, 0, vocab, logits.device)
    out = seeds.new_empty(batch) if out is None else out
    Drawing(logits, heat, seeds, positions, place, work, out).run()
    return out


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels run there: on CUDA, and on the CPU if Triton interprets them."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _workspace(
    given: Workspace | None, batch: int, width: int, vocab: int, device: torch.device
) -> Workspace:
    if given is None:
        return Workspace(batch, width, vocab, device)
    if given.sizes != (batch, width, vocab):
        raise ValueError(
            f"workspace: must be of (B, K, V) = {(batch, width, vocab)}; got {given.sizes}"
        )
    return given


def _copied(out: LogitsVerdict, ids: Tensor, counts: Tensor) -> LogitsVerdict:
    out.output_token_ids.copy_(ids)
    out.num_accepted.copy_(counts)
    return out
