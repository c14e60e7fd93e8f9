"""The parts of vLLM's model runner V2 that are relied on, with the names it publishes (0.33.0).

``tests/vllm_engine/test_model_runner_v2.py`` runs vLLM's own.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GPU = "vllm.v1.worker.gpu"
INTERFACE = f"{GPU}.sample.logits_processor.interface"
SAMPLER = f"{GPU}.sample.sampler"
REJECTION = f"{GPU}.spec_decode.rejection_sampler"
STATES = f"{GPU}.sample.states"


def _record(name: str, *names: str) -> Any:
    return make_dataclass(name, [(own, Any, None) for own in names], frozen=True)


LogitsProcRequestState = _record(
    "LogitsProcRequestState", "device", "max_num_reqs", "vocab_size", "all_token_ids",
    "prompt_len", "prefill_len", "total_len",
)  # fmt: skip
LogitsContext = _record(
    "LogitsContext", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np",
    "expanded_local_pos", "input_ids", "pos", "seq_lens_upper_bound_np",
)  # fmt: skip


class LogitsProcessor(ABC):
    def __init__(self, vllm_config, req_states):  # noqa: B027
        pass

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params) -> None:
        pass

    def add_request(self, req_idx, sampling_params) -> bool:
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def apply(self, logits, ctx):
        raise NotImplementedError


def rejection_sample(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    seed,
    num_speculative_steps,
    synthetic_conditional_rates=None,
    use_fp64=False,
    use_block_verification=False,
    contexts=None,
    watermarking=None,
    watermarking_skip_mask=None,
    watermark_key=None,
    fly_window_size=0,
    fly_entropy_threshold=0.3,
    fly_entropy_top_k=3,
):
    raise AssertionError("the engine's own function was asked")


class RejectionSampler:
    """Calls ``rejection_sample`` as the runner does."""

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
        **rules,
    ):
        function = sys.modules[REJECTION].rejection_sample  # type: ignore[attr-defined]
        given = dict(zip(WIDE, (self.temperature, self.seed, self.steps), strict=True))  # type: ignore[attr-defined]
        return function(
            logits, draft_logits, verify_draft_sampled, cu_num_logits, pos, idx_mapping,
            expanded_idx_mapping, expanded_local_pos, *given.values(), None, use_fp64=False,
            **rules,
        )  # fmt: skip


WIDE = ("temperature", "seed", "num_speculative_steps")


class Sampler:
    def add_request(self, req_idx, sampling_params):
        return None


class SamplingStates:
    def __init__(self):
        self.seen = {}

    def add_request(self, req_idx, sampling_params):
        self.seen[req_idx] = sampling_params


def put(monkeypatch, around: bool = True, **other) -> None:
    """Make these importable as vLLM; ``other`` replaces some of them by name.

    ``around``: make the packages above them, too, which another stand-in may have made.
    """
    here = {**globals(), **other}
    above = ["vllm.v1.worker", "vllm.v1", "vllm"] if around else []
    inner = [f"{GPU}.sample", f"{GPU}.sample.logits_processor", f"{GPU}.spec_decode"]
    for name in (*above, GPU, *inner):
        _module(monkeypatch, name, __path__=[], __version__="0.33.0")
    names = ("LogitsContext", "LogitsProcessor", "LogitsProcRequestState")
    _module(monkeypatch, INTERFACE, **{name: here[name] for name in names})
    sampler = type("Sampler", (here["Sampler"],), {"add_request": here["Sampler"].add_request})
    _module(monkeypatch, SAMPLER, Sampler=sampler)
    states = {"add_request": here["SamplingStates"].add_request}
    _module(monkeypatch, STATES, SamplingStates=type("SamplingStates", (SamplingStates,), states))
    runner = type("RejectionSampler", (here["RejectionSampler"],), {})
    runner._verify = here["RejectionSampler"]._verify
    _module(
        monkeypatch, REJECTION, RejectionSampler=runner, rejection_sample=here["rejection_sample"]
    )


def _module(monkeypatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package="__path__" in content)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
