r"""A logits processor for vLLM's model runner V2: lossy verification of deterministic drafts.

::

    CACTUS_POLICY=band:price=2 vllm serve MODEL --speculative-config '{"method": "ngram", …}' \\
        --logits-processors cactus_theory.vllm.logits_processor:CactusLogitsProcessor

The engine's own verification is left as it is and gets biased logits; see
:mod:`cactus_theory.vllm.bias` for the law and which policies have one. A server whose drafts are
sampled is refused at start-up (there the hook of :mod:`cactus_theory.vllm.model_runner_v2` is for),
and so are vLLM's own lossy methods.

* vLLM's top_p, top_k and min_p act after a processor, on the biased row, and would cut another
  set. Beside a lossy policy they are taken over: the processor cuts q first (a sort of every row
  of the batch), the policy acts on what is left, and vLLM's sampler sees a copy of the request
  without them.
* Penalties, bad words and a grammar come before: q is the row after them, and tokens that they
  exclude are not raised. A thinking budget is enforced afterwards.
* Raw logprobs, vLLM's default, are the target's own; processed ones are those of the bias.
* ``apply`` is a fixed sequence of tensor operations without a synchronisation where every
  policy is band at a KL price. It reads no row, or each once where it looks ahead. Other policies
  solve rows of two tokens and may wait for the device.

There is no engine on a CPU for this runner, so none was run. Tested: the published interface by
its names, batches in its layout against the exact laws, and the runner's real rejection function
(0.32.0, 0.33.0) under Triton's interpreter on logits that this class has biased.
"""

import copy
import importlib.util
import logging
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cactus_theory.policies import Policy
from cactus_theory.vllm.bias import Cut, drafted_bias, is_lossless, lifts_of, truncate_
from cactus_theory.vllm.install import drafts_of
from cactus_theory.vllm.replace import (
    require_names,
    require_parameters,
    unknown_version,
    wrapped,
)
from cactus_theory.vllm.settings import Settings, check_names, read

INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor.interface"
METHODS = {
    "__init__": ("self", "vllm_config", "req_states"),
    "add_request": ("self", "req_idx", "sampling_params"),
    "apply_staged_writes": ("self",),
    "apply": ("self", "logits", "ctx"),
}
CONTEXT = ("expanded_idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids")
COLUMNS = ("policy", "temperature", *Cut._fields)  # of a slot, on the device
STATE = ("device", "max_num_reqs")
_log = logging.getLogger(__name__)

if importlib.util.find_spec("vllm") is None:
    raise ModuleNotFoundError(
        f"{__name__} is a plugin of vLLM, which is not installed here; try: "
        "pip install 'cactus-theory[vllm]', or cactus_theory.vllm.bias without it"
    )
try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (  # pyright: ignore
        LogitsContext,
        LogitsProcessor,
        LogitsProcRequestState,
    )
except ImportError as error:
    raise unknown_version(f"{INTERFACE} cannot be imported ({error})") from None

for _name, _parameters in METHODS.items():
    require_parameters(getattr(LogitsProcessor, _name), _parameters)
require_names(LogitsProcessor, "validate_params")
require_names(LogitsContext, *CONTEXT)
require_names(LogitsProcRequestState, *STATE)


@lru_cache(maxsize=1)
def server_settings() -> Settings:
    """Return the settings of the server; ValueError for a bad one."""
    settings = read(by_bias=True)
    assert settings is not None
    return settings


class CactusLogitsProcessor(LogitsProcessor):
    """Raise the logit of each drafted token by what its request's policy asks for."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        from cactus_theory.vllm import model_runner_v2

        check_names()
        self.width = drafts_of(vllm_config)
        model_runner_v2.remove()  # else the policy would act twice
        take_over_cuts()
        settings = server_settings()  # a bad setting stops the start-up here
        self.device, requests = req_states.device, req_states.max_num_reqs
        policies = {rule.spec: rule for rule in (settings.policy, *settings.policies.values())}
        self.numbers = {spec: number for number, spec in enumerate(policies)}
        whole = settings.verifier.name == "block"
        self.lifts = lifts_of([*policies.values()], self.device, whole=whole)
        self.acting, self.cutting = np.zeros((2, requests), dtype=bool)
        self.table = torch.zeros(requests, len(COLUMNS), dtype=torch.float64, device="cpu")
        self.on_device = self.table.to(self.device)
        self.changed = False

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for a request that cannot be served as it asks."""
        server_settings().grant(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take over a slot; return whether logits of the request are changed."""
        policy = server_settings().served(sampling_params, _log.warning).policy
        temperature, cut = float(sampling_params.temperature), cut_of(policy, sampling_params)
        self.cutting[req_idx] = cut != Cut()
        raises = self.width > 0 and temperature > 0 and not is_lossless(policy)
        self.acting[req_idx] = raises or self.cutting[req_idx]
        values = [self.numbers[policy.spec], temperature, *cut]
        self.table[req_idx] = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.changed = True
        return bool(self.acting[req_idx])

    def apply_staged_writes(self) -> None:
        """Bring what joined since the last step to the device."""
        if self.changed:
            self.on_device, self.changed = self.table.to(self.device), False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Truncate ``logits`` (rows, V) where asked, and add the bias, in place."""
        if not self.acting[ctx.idx_mapping_np].any():
            return logits
        rows, vocab = logits.shape
        drafted = tested_tokens(ctx.input_ids[:rows], ctx.expanded_local_pos[:rows], vocab)
        columns = self.on_device[ctx.expanded_idx_mapping[:rows].long()]
        policy, heat, *cut = columns.unbind(-1)
        if self.cutting[ctx.idx_mapping_np].any():
            cuts = dict(zip(Cut._fields, cut, strict=True))
            truncate_(logits, heat, **(cuts | {"top_k": cuts["top_k"].long()}))
        present = self.table[:, 0].numpy()[ctx.idx_mapping_np].astype(int).tolist()
        bias = drafted_bias(
            self.lifts, logits, drafted, heat,
            choice=policy.long(), present=present, width=self.width,
        )  # fmt: skip
        place = drafted.clamp(min=0)[:, None]
        return logits.scatter_add_(1, place, bias.to(logits.dtype)[:, None])


def cut_of(policy: Policy, sampling_params: Any) -> Cut:
    """Return a request's own cuts where they are made here, before a lossy policy acts."""
    own = sampling_params
    if not own.temperature > 0 or is_lossless(policy):
        return Cut()
    return Cut(own.top_p, max(own.top_k or 0, 0), own.min_p or 0.0)


def take_over_cuts() -> None:
    """Let vLLM's sampler, which is shown requests first, see copies without their cuts."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates  # pyright: ignore

    require_parameters(SamplingStates.add_request, METHODS["add_request"])
    if hasattr(SamplingStates.add_request, "cactus_original"):
        return

    @wrapped(SamplingStates, "add_request")
    def add_request(original: Any, states: Any, req_idx: int, sampling_params: Any) -> Any:
        granted = server_settings().served(sampling_params, _log.warning)
        if cut_of(granted.policy, sampling_params) != Cut():
            sampling_params = copy.copy(sampling_params)
            for name, value in Cut()._asdict().items():
                setattr(sampling_params, name, value)
        return original(states, req_idx, sampling_params)


def tested_tokens(input_ids: Tensor, local_pos: Tensor, vocab: int) -> Tensor:
    """Return the drafted token that is tested at each row (rows,), negative where there is none.

    A row is fed ``input_ids`` and tests what the following row of its request is fed; the first
    row of a request has the local position 0. Placeholders are negative.
    """
    following = input_ids[1:].long()
    tested = (local_pos[1:] > 0) & (following < vocab)
    drafted = torch.full_like(input_ids, -1, dtype=torch.int64)
    drafted[:-1] = torch.where(tested, following, -1)
    return drafted
