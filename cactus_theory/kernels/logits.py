"""Verify drafted tokens from logits, by a few Triton kernels without a table of probabilities.

The same step in PyTorch serves policies without a kernel, and CPUs.
"""

import importlib
import os
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.rows import warn_of_probabilities
from cactus_theory.kernels import random_numbers
from cactus_theory.kernels.buffers import (
    COUNTS,
    WHOLE,
    Requests,
    Workspace,
    check_per_request,
    check_shapes,
    checked_temperature,
)
from cactus_theory.kernels.policies import kernel_policy
from cactus_theory.policies import Policy, read_policy
from cactus_theory.verify import Assignment, Draft, find_verifier

# least release of Triton: older kernels do not take groups of parameters with None among them
LEAST_TRITON = (3, 4)


class LogitsVerdict(NamedTuple):
    """Result of :func:`verify_logits`: emitted token ids and numbers of accepted tokens."""

    output_token_ids: Int[Tensor, "batch width"]
    num_accepted: Int[Tensor, "batch"]


def verify_logits(
    policy: str | Policy,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    *,
    seeds: Tensor,
    positions: Tensor,
    temperature: float | Tensor = 1.0,
    lengths: Tensor | None = None,
    verifier: str = "chain",
    workspace: Workspace | None = None,
    out: LogitsVerdict | None = None,
) -> LogitsVerdict:
    r"""Accept drafted tokens and draw one recovered or bonus token per request, from raw logits.

    The emitted law is that of :func:`cactus_theory.verify_chain` (or ``verify_block``) on rows
    softmax(l/T). Random numbers are functions of a request's seed and position (see
    ``cactus_theory/kernels/random_numbers.py``), so that a request emits the same tokens alone and
    in any batch.

    On a CUDA device, policies with a kernel (:func:`has_kernel`) run in a fixed sequence of
    launches. Nothing is read on the host, no table of probabilities is written, and a step can be
    captured in a CUDA graph (run each shape once before; with ``workspace`` and ``out`` nothing is
    allocated). Probabilities are float32; q and p of drafted tokens are float64. Every row is read
    once, and the row of the recovered or bonus token is read again. The band at a price has further
    reads. It reads again, all at once, the rows of
    drafted tokens that lossless sampling rejects and a band may accept, up to the first token that
    is rejected under every band. Then it reads the rejected
    token's row 2 to 4 times to solve the band. The verifier ``block`` reads again the rows after
    the last node with alive ratio 1, and under the band solves the rows of the drafted path.

    Other policies, and CPUs, run in PyTorch, with softmax rows in float64. The emitted law is the
    same and, up to rounding, so are the tokens; the host may wait for the device.

    Parameters
    ----------
    policy : a policy or its spec.
    target_logits : (B, K + 1, V), the last row for the bonus token. float32, bfloat16 or float16;
        any strides with stride 1 along V. −inf excludes a token.
    draft_logits : (B, K, V); None if the draft was deterministic.
    draft_token_ids : (B, K) int64; −1 ends a request's draft. A token outside the vocabulary is
        rejected.
    seeds : (B,) int64, one seed per request.
    positions : (B,) int64, number of tokens in the request's text before this step.
    temperature : one number, or (B,) float32, for target and draft. At 0 both rows are one-hot:
        the target's row at the first of its largest logits, the draft's row at the drafted token.
    lengths : (B,) int32 or int64, drafted tokens of each request, if −1 does not end the draft.
    verifier : ``chain`` or ``block``; bonus tokens are drawn from the target's (tilted) row.
    workspace : memory for intermediate results; None allocates new memory.
    out : memory for the result; None allocates new memory.

    Returns
    -------
    output_token_ids : (B, K + 1) int64: the accepted tokens, one recovered or bonus token, −1.
    num_accepted : (B,) int64, without the recovered or bonus token.

    Notes
    -----
    At a target row that is no distribution (with a NaN or +inf logit, or only −inf) the drafted
    token is rejected and the next id is −1. A step never emits an id outside the vocabulary. Values
    are not checked on the host: the caller should raise an error if
    ``output_token_ids[b, num_accepted[b]]`` is −1.

    Raises
    ------
    ValueError
        Shapes, devices or strides that do not match; values on the device are not checked.
    TypeError
        Logits or ids of an unsupported dtype.
    ImportError
        On CUDA without Triton (extra ``kernels``), or with a Triton before 3.4.

    Examples
    --------
    >>> target = torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])  # one request, one drafted token
    >>> draft, ids = torch.tensor([[[0.0, 9.0]]]), torch.tensor([[1]])
    >>> at = {"seeds": torch.tensor([7]), "positions": torch.tensor([12])}
    >>> step = verify_logits(ct.policy("speculative"), target, draft, ids, **at, temperature=0)
    >>> step.output_token_ids, step.num_accepted
    (tensor([[1, 0]]), tensor([1]))
    """
    policy = read_policy(policy)
    batch, width, vocab = check_shapes(target_logits, draft_logits, draft_token_ids)
    device = target_logits.device
    check_per_request(batch, device, WHOLE, seeds=seeds, positions=positions)
    if lengths is not None:
        check_per_request(batch, device, COUNTS, lengths=lengths)
    temperature = checked_temperature(temperature, batch, device)
    ids_step = draft_token_ids.stride(0)
    requests = Requests(draft_token_ids, ids_step, lengths, temperature, vocab, seeds, positions)
    kernel = kernel_policy(policy, verifier)
    if kernel is None or not runs_kernels(device):
        if not target_logits.is_cuda and target_logits.numel():
            warn_of_probabilities("target_logits", target_logits[0, 0])
        emitted = verify_in_torch(policy, verifier, target_logits, draft_logits, requests)
        if out is None:
            return emitted
        for memory, result in zip(out, emitted, strict=True):
            memory.copy_(result)
        return out
    launches, sizes = _launches(), (batch, width, vocab)
    work = workspace or Workspace(*sizes, device)
    if work.sizes != sizes:
        raise ValueError(f"workspace: must be of (B, K, V) = {sizes}; got {work.sizes}")
    if out is None:
        ids = draft_token_ids.new_empty(batch, width + 1)
        out = LogitsVerdict(ids, draft_token_ids.new_empty(batch))
    rows, block = (target_logits, draft_logits), verifier == "block"
    launches.Step(kernel, block, requests, *rows, work, output=out[0], counts=out[1]).run()
    return out


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels run on a device: on CUDA, or in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def old_triton() -> str | None:
    """Return Triton's version if too old for the kernels, as with torch 2.6 and 2.7; else None."""
    version = check.optional_module("triton", "kernels").__version__
    return version if tuple(map(int, version.split(".")[:2])) < LEAST_TRITON else None


def _launches() -> ModuleType:
    if (version := old_triton()) is not None:
        raise ImportError(f"triton: must be 3.4 or later; got {version}")
    return importlib.import_module("cactus_theory.kernels._launch")


def verify_in_torch(
    policy: Policy,
    verifier: str,
    target: Float[Tensor, "batch width1 vocab"],
    draft: Float[Tensor, "batch width vocab"] | None,
    requests: Requests,
) -> LogitsVerdict:
    """Verify a step in PyTorch, with softmax rows in float64.

    A draft ends before the first token that is outside the vocabulary, or whose row is no
    distribution; if that row is the target's, the next id is −1. ValueError for an unknown
    verifier, or a policy that the verifier cannot verify.
    """
    judge = find_verifier(verifier)
    judge.check(policy)
    ids, vocab = requests.ids, requests.vocab
    places = torch.arange(target.shape[1], device=ids.device).expand(len(ids), -1)
    lengths = torch.full_like(requests.seeds, ids.shape[1])
    if requests.lengths is not None:
        lengths = torch.minimum(lengths, requests.lengths)
    heat = torch.as_tensor(requests.temperature, dtype=torch.float64, device=requests.seeds.device)
    temperature = heat.expand(len(ids))[:, None, None]
    lawful = target.amax(-1).isfinite()
    verifiable = lawful[:, :-1] & (ids >= 0) & (ids < vocab)
    if draft is not None:
        drawable = draft.amax(-1).isfinite()
        verifiable = verifiable & (drawable | (temperature[..., 0] == 0))
        draft = torch.where(drawable[..., None], draft, 0.0)
    lengths = torch.minimum(lengths, verifiable.long().cumprod(-1).sum(-1))
    # zeros stand in for rows and ids that verifiers cannot read; nothing is decided by them
    target = torch.where(lawful[..., None], target, 0.0)
    tokens = torch.where(places[:, :-1] < lengths[:, None], ids, 0)
    q, p = _probabilities(target, temperature), None
    if draft is not None:
        one_hot = torch.nn.functional.one_hot(tokens, vocab).double()
        p = torch.where(temperature > 0, _probabilities(draft, temperature), one_hot)
    keys = requests.seeds, requests.positions
    accept = random_numbers.coins(*keys, places[:, :-1], random_numbers.ACCEPT)
    draw = random_numbers.coins(*keys, places[:, :1], random_numbers.DRAW)[:, 0]
    verdict = judge.verify(Assignment((policy,)), q, Draft(tokens, lengths, p), accept, draw)
    undecided = (places == verdict.num_accepted[:, None]) & ~lawful
    return LogitsVerdict(torch.where(undecided, -1, verdict.output_token_ids), verdict.num_accepted)


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return softmax(l/T), one-hot at the first largest logit where T = 0."""
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0)
    likely = torch.nn.functional.one_hot(scaled.argmax(-1), scaled.shape[-1]).double()
    return torch.where(temperature > 0, scaled.softmax(-1), likely)
