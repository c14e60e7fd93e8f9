"""The hook of vLLM's model runner V2, for drafts that are sampled.

``install`` puts :class:`Hook` where ``vllm.v1.worker.gpu.spec_decode.rejection_sampler`` looks up
``rejection_sample``, and wraps two methods that tell it which requests it serves and what they
asked for (``RejectionSampler._verify``, ``Sampler.add_request``). Names of parameters are compared
first, and an unknown one is refused: it may be a rule of its own.

What the engine passes, and what :func:`requests_of` makes of it, in the layout of
:func:`cactus_theory.kernels.verify_logits`:

* target rows after every processor, temperature, min_p, top-p and top-k, with the bonus row of
  each request last: q is their softmax;
* draft rows by request and place, before temperature: p is softmax(l/T), without the truncation
  of q, which is the law that drafts are drawn from; None for deterministic drafts. If the draft's
  vocabulary is smaller, tokens beyond it are padding, as in the function that is replaced;
* a row at temperature 0 accepts a token iff it is the target's first largest; −1 ends a draft;
* ``seed`` and the position of a request. The engine hashes the seed itself into the noise of
  drafted tokens and into its own recovery (vLLM pull request 54282 separates the two). Here the
  seed is salted first and goes to Philox, whose coins and noise have streams of
  their own: no number that drew a draft judges or replaces it. A request's tokens are a function
  of its seed, its drafts and its rows, whatever the batch.

Policies with a kernel (``has_kernel``) are decided without reading anything on the host; others
take the torch path and may wait. Where every request has K drafted tokens the target's rows are
used in place, else they are copied into (requests, K + 1, V); draft rows are always copied.
Requests with a policy of their own are judged together with those of the same policy, copied.
There are no counters here.

There is no engine on a CPU for this runner, so none was run. Tested: this function in the
published layout under Triton's interpreter against exact laws, and beside the real functions of
0.32.0 and 0.33.0, whose drafting noise it is given.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.kernels import verify_logits
from cactus_theory.policies import Policy
from cactus_theory.vllm.replace import (
    UnknownVersion,
    refuse_other_rules,
    require_parameters,
    stop,
    unknown_version,
    unwrap,
    wrapped,
)
from cactus_theory.vllm.settings import PROCESSOR, Settings

# XOR mask of seeds, digits of π in 62 bits: no two requests' seeds differ by it by accident
SALT = 0x3141592653589793


@dataclass(frozen=True)
class Requests:
    """The drafts of a batch in the layout of :func:`cactus_theory.kernels.verify_logits`."""

    target: Float[Tensor, "R K1 V"]  # logits at temperature 1
    draft: Float[Tensor, "R K V"] | None  # logits at temperature 1, None for deterministic drafts
    drafted: Int[Tensor, "R K"]  # int64, −1 ends a draft
    seeds: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    heat: Float[Tensor, "R"]  # 0 for greedy requests, else 1

    def verify(self, policy: Policy, verifier: str) -> tuple[Tensor, Tensor]:
        """Return the emitted tokens (R, K + 1) int64, and how many (R,) int32.

        What follows them is 0. A row with a NaN in it gives some token of the vocabulary.
        """
        verdict = verify_logits(
            policy, self.target, self.draft, self.drafted, seeds=self.seeds,
            positions=self.positions, temperature=self.heat, verifier=verifier,
        )  # fmt: skip
        tokens = verdict.output_token_ids.clamp_(0, self.target.shape[-1] - 1)
        return tokens, (verdict.num_accepted + 1).int()

    def part(self, places: Int[Tensor, "some"]) -> "Requests":
        """Return some of the requests, copied."""
        draft = None if self.draft is None else self.draft[places]
        rest = (self.drafted, self.seeds, self.positions, self.heat)
        return Requests(self.target[places], draft, *(part[places] for part in rest))


def requests_of(
    target_logits: Float[Tensor, "rows V"],
    draft_logits: Float[Tensor, "slots K W"] | None,
    draft_sampled: Int[Tensor, "rows"],
    cu_num_logits: Int[Tensor, "R1"],
    pos: Int[Tensor, "rows"],
    idx_mapping: Int[Tensor, "R"],
    temperature: Float[Tensor, "slots"],
    seed: Int[Tensor, "slots"],
    num_speculative_steps: int,
) -> Requests:
    """Return a batch of the engine in padded layout; nothing is read on the host.

    ``draft_sampled`` holds at each row the token that led to it: a request's drafted tokens are
    those of all its rows but the first.
    """
    slots, starts = idx_mapping.long(), cu_num_logits[:-1].long()
    width = num_speculative_steps
    count, rows = len(slots), len(target_logits)
    heat = temperature[slots].float()
    sampled, draft = heat > 0, None
    if draft_logits is not None:
        target_logits = target_logits[:, : draft_logits.shape[-1]]
        draft = draft_logits[slots, :width, : target_logits.shape[-1]].float()
        draft = draft.div_(torch.where(sampled, heat, 1.0)[:, None, None])
    place = torch.arange(width + 1, device=slots.device)
    at = (starts[:, None] + place).clamp(max=rows - 1)
    if rows == count * (width + 1):
        target = target_logits.unflatten(0, (count, width + 1))
    else:
        target = target_logits[at]
    there = place[1:] < (cu_num_logits[1:].long() - starts)[:, None]
    drafted = torch.where(there, draft_sampled.long()[at[:, 1:]], -1)
    seeds, positions = seed[slots] ^ SALT, pos.long()[at[:, 0]] + 1
    return Requests(target, draft, drafted, seeds, positions, sampled.float())


SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
PARAMETERS = (
    "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping",
    "expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps",
    "synthetic_conditional_rates",
)  # fmt: skip
READ = (*PARAMETERS[:6], *PARAMETERS[8:11])
PRECISION = ("use_fp64",)  # coins here have 53 bits anyway
REFUSED = (
    "use_block_verification", "contexts", "watermarking", "watermarking_skip_mask",
    "watermark_key", "fly_window_size", "synthetic_conditional_rates",
)  # fmt: skip
IGNORED = ("fly_entropy_threshold", "fly_entropy_top_k")  # mean nothing without a window
VERIFY = (
    "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping",
    "idx_mapping_np",
)  # fmt: skip
_log = logging.getLogger(__name__)


class Hook:
    """Judges the drafts of one process.

    ``policies`` are by slot those of requests that asked for one; ``slots`` those of the running
    chunk, on the host, None outside.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.calls = settings, 0
        self.policies: dict[int, Policy] = {}
        self.slots: np.ndarray | None = None

    def rejection_sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return (R, K + 1) int64 tokens and (R,) int32 counts, as the function it replaces.

        RuntimeError if a rule of the engine's own is asked for, too.
        """
        arguments = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        refuse_other_rules(arguments, REFUSED)
        self.calls += 1
        batch = requests_of(**{name: arguments[name] for name in READ})
        verifier = self.settings.verifier.name
        groups = self._groups(len(batch.drafted))
        if len(groups) == 1:
            return batch.verify(groups[0][0], verifier)
        ids = batch.drafted.new_zeros(len(batch.drafted), batch.drafted.shape[1] + 1)
        counts = ids.new_zeros(len(ids), dtype=torch.int32)
        for policy, chosen in groups:
            places = torch.tensor(chosen, device=ids.device)
            ids[places], counts[places] = batch.part(places).verify(policy, verifier)
        return ids, counts

    def add_request(self, slot: int, sampling_params: Any) -> None:
        """Take note of what a request asks for; one that is not admitted is lossless."""
        self.policies.pop(slot, None)
        policy = self.settings.served(sampling_params, _warn).policy
        if policy is not self.settings.policy:
            self.policies[slot] = policy

    def _groups(self, count: int) -> list[tuple[Policy, list[int]]]:
        """Return the policies of a batch, each with the places of its requests."""
        server_policy = self.settings.policy
        if self.slots is None or len(self.slots) != count or not self.policies:
            return [(server_policy, list(range(count)))]
        groups: dict[str, tuple[Policy, list[int]]] = {}
        for place, slot in enumerate(self.slots.tolist()):
            policy = self.policies.get(slot, server_policy)
            groups.setdefault(policy.spec, (policy, []))[1].append(place)
        return list(groups.values())


def install(settings: Settings) -> Hook:
    """Let the policy decide the drafts of model runner V2; a second call changes nothing.

    UnknownVersion for functions with other parameters than those known here, ImportError for a vLLM
    without this runner.
    """
    if (hook := installed()) is not None:
        return hook
    module, sampler = known_functions()
    hook = Hook(settings)
    at = VERIFY.index("idx_mapping_np")

    @wrapped(module.RejectionSampler, "_verify")
    def verify(original: Any, *args: Any, **kwargs: Any) -> Any:
        hook.slots = kwargs["idx_mapping_np"] if len(args) <= at else args[at]
        calls = hook.calls
        try:
            output = original(*args, **kwargs)
        finally:
            hook.slots = None
        if hook.calls == calls:
            raise RuntimeError(
                "CACTUS_POLICY is set and vLLM verified drafts without asking cactus-theory"
            )
        return output

    @wrapped(sampler, "add_request")
    def add_request(original: Any, own: Any, req_idx: int, sampling_params: Any) -> Any:
        hook.add_request(req_idx, sampling_params)
        return original(own, req_idx, sampling_params)

    @wrapped(module, "rejection_sample")
    def rejection_sample(_: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return hook.rejection_sample(*args, **kwargs)

    rejection_sample.cactus_hook = hook
    return hook


def installed() -> Hook | None:
    """Return the hook that is in its place, None if there is none."""
    module = sys.modules.get(MODULE)
    return getattr(getattr(module, "rejection_sample", None), "cactus_hook", None)


def require_hook(warn: Callable[[str], None]) -> None:
    """Stop the start-up unless the hook is in place."""
    if installed() is not None:
        return warn("cactus-theory: drafts are decided on model runner V2; nothing is counted")
    why = "it is not installed"
    try:
        known_functions()
    except (ImportError, UnknownVersion) as error:
        why = str(error)
    stop(
        f"no hook for model runner V2 ({why}); set VLLM_USE_V2_MODEL_RUNNER=0, or load "
        f"--logits-processors {PROCESSOR}"
    )


def remove() -> None:
    """Put back what was there, for example because a logits processor does the work."""
    if installed() is not None:
        module: Any = import_module(MODULE)
        for thing, name in (
            (module, "rejection_sample"),
            (module.RejectionSampler, "_verify"),
            (import_module(SAMPLER).Sampler, "add_request"),
        ):
            unwrap(thing, name)


def known_functions() -> tuple[Any, Any]:
    """Return the module of ``rejection_sample`` and the class Sampler; raise as :func:`install`."""
    module: Any = import_module(MODULE)
    sampler: Any = import_module(SAMPLER).Sampler
    require_parameters(module.rejection_sample, PARAMETERS)
    known_parameters = {*PARAMETERS, *PRECISION, *REFUSED, *IGNORED}
    new = [name for name in inspect.signature(module.rejection_sample).parameters
           if name not in known_parameters]  # fmt: skip
    if new:
        raise unknown_version(f"rejection_sample also takes {', '.join(new)}")
    require_parameters(module.RejectionSampler._verify, VERIFY)
    require_parameters(sampler.add_request, ("self", "req_idx", "sampling_params"))
    return module, sampler


def _warn(text: str) -> None:
    _log.warning("cactus-theory: %s", text)
