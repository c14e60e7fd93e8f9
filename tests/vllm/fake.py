"""The parts of vLLM that the package touches, as modules of a few lines, and a server of them."""

import re
import sys
import types
from dataclasses import dataclass, field

import torch

REJECTION_SAMPLER = """
import torch

def rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens,
                     draft_probs, target_logits, bonus_token_ids, sampling_metadata,
                     synthetic_mode=False):
    return torch.full((len(num_draft_tokens), max_spec_len + 1), STOCK, dtype=torch.int32)

def expand_batch_to_tokens(x, ends, count, replace_from=0, replace_to=0):
    return x.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))

class RejectionSampler:
    def forward(self, *given, **more):
        return rejection_sample(*given, **more)
"""
STOCK = -7  # what the fake original answers


def named(spec):
    """Return the name that a spec has in what :func:`offered` returns."""
    return re.sub("[:=,+]", ".", spec)


def offered(*specs):
    """Return these policies as ``CACTUS_POLICIES`` has them."""
    return ";".join(f"{named(spec)}={spec}" for spec in specs if spec != "speculative")


@dataclass
class Metadata:
    """As vLLM's SamplingMetadata, as far as it is read."""

    temperature: torch.Tensor | None
    all_greedy: bool = False
    all_random: bool = True
    generators: dict = field(default_factory=dict)


class SamplingParams:
    extra_args = None

    def __init__(self, extra_args=None):
        self.extra_args = extra_args
        self.verified = False

    def verify(self, *args):
        self.verified = True


@dataclass
class InputBatch:
    req_ids: list = field(default_factory=list)


@dataclass
class CachedRequestState:
    sampling_params: SamplingParams | None = None


@dataclass
class SchedulerOutput:
    finished_req_ids: set


@dataclass
class Request:
    request_id: str
    reason: str
    num_output_tokens: int = 0

    def get_finished_reason(self):
        return self.reason


class Scheduler:
    def __init__(self):
        self.finished = set()

    def _free_request(self, request, delay_free_blocks=False):
        self.finished.add(request.request_id)

    def schedule(self, throttle_prefills=False):
        output, self.finished = SchedulerOutput(self.finished), set()
        return output


class Metric:
    """As prometheus_client's, without a registry: a child has the sum of what it was given."""

    made = []

    def __init__(self, name, words, labels, **where):
        self.name, self.label_names, self.children = name, set(labels), {}
        self.made.append(self)

    def labels(self, **labels):
        assert labels.keys() == self.label_names
        key = tuple(sorted(labels.items()))
        child = self.children.setdefault(key, types.SimpleNamespace(value=0, count=0))

        def add(more):
            child.value, child.count = child.value + more, child.count + 1

        child.inc = child.observe = add
        child.set = lambda value: setattr(child, "value", value)
        return child


def shown(name):
    """Return the value of each child of the newest metric of a name, by its labels as a dict."""
    metric = next(own for own in reversed(Metric.made) if own.name == name)
    return [(dict(labels), child.value) for labels, child in metric.children.items()]


def config(**more):
    """Return what a server is to be, with drafts."""
    model = types.SimpleNamespace(served_model_name="served")
    engines = types.SimpleNamespace(data_parallel_index=1)
    own = {"speculative_config": drafts(), "model_config": model, "parallel_config": engines}
    return types.SimpleNamespace(**({"use_v2_model_runner": False} | own | more))


def drafts(method="standard"):
    return types.SimpleNamespace(rejection_sample_method=method, model="/at/draft")


def requests(*policies):
    """Return requests by their names, with what each asks for."""
    every = [None if own is None else {"cactus": named(own)} for own in policies]
    return {f"r{n}": CachedRequestState(SamplingParams(extra)) for n, extra in enumerate(every)}


def seeded(seed, rows):
    return {row: torch.Generator().manual_seed(seed + row) for row in range(rows)}


def call(batch, metadata=None):
    """Return the arguments of one call of the rejection sampler."""
    ends = torch.tensor(batch.counts, dtype=torch.int32).cumsum(0)
    own = metadata or Metadata(torch.ones(len(batch.counts)), generators=batch.generators)
    given = [batch.ids, batch.counts, batch.width, ends, batch.draft_probs, batch.target_logits]
    return [*given, batch.bonus[:, None], own]


def step(runner, batch, names=None, metadata=None):
    """Let requests take a step, in this order; return what is emitted."""
    runner.input_batch = InputBatch(list(names or runner.requests))
    return runner._sample(None, call(batch, metadata))


def end(runner, *names):
    runner._update_states(SchedulerOutput(set(names)))


def module(name, **own):
    found = types.ModuleType(name)
    vars(found).update(own)
    return found


def install(monkeypatch, source=REJECTION_SAMPLER, logged=None):
    """Put a fake vLLM in place; return its module with the rejection sampler, and the runner."""
    logged = [] if logged is None else logged
    logger = types.SimpleNamespace(info=logged.append, warning=logged.append)
    sampler = module("vllm.v1.sample.rejection_sampler", STOCK=STOCK)
    exec(source, vars(sampler))

    class GPUModelRunner:
        vllm_config = config()

        def __init__(self, **requests):
            self.requests = requests
            self.input_batch = InputBatch(list(requests))
            self.discard_request_mask = types.SimpleNamespace(np=[False] * 32)

        def _update_states(self, scheduler_output):
            for name in scheduler_output.finished_req_ids:
                self.requests.pop(name, None)

        def _sample(self, logits, spec_decode_metadata):
            if spec_decode_metadata is None:
                return "no drafts"
            return sampler.RejectionSampler().forward(*spec_decode_metadata)

    class EngineArgs:
        def create_engine_config(self):
            return self.config

    platform = types.SimpleNamespace(
        is_cpu=lambda: True, register_triton_kernel_overrides=lambda: None
    )
    modules = [
        module("vllm", __version__="9.9.9"),
        module("vllm.config", VllmConfig=type("VllmConfig", (), {"use_v2_model_runner": False})),
        module("vllm.logger", init_logger=lambda name: logger),
        module("vllm.envs", VLLM_LOG_STATS_INTERVAL=10.0, VLLM_ENABLE_V1_MULTIPROCESSING=True),
        module("vllm.distributed", get_tensor_model_parallel_rank=lambda: 0),
        module("vllm.platforms", current_platform=platform),
        module("vllm.exceptions", VLLMValidationError=type("Refused", (ValueError,), {})),
        module("vllm.sampling_params", SamplingParams=type("Params", (SamplingParams,), {})),
        module("vllm.engine"),
        module("vllm.engine.arg_utils", EngineArgs=EngineArgs),
        module("vllm.v1"),
        module("vllm.v1.core"),
        module("vllm.v1.core.sched"),
        module("vllm.v1.core.sched.output", SchedulerOutput=SchedulerOutput),
        module("vllm.v1.core.sched.scheduler", Scheduler=type("Scheduler", (Scheduler,), {})),
        module("vllm.v1.request", Request=Request),
        module("vllm.v1.sample", rejection_sampler=sampler),
        sampler,
        module("vllm.v1.sample.metadata", SamplingMetadata=Metadata),
        module("vllm.v1.worker"),
        module(
            "vllm.v1.worker.gpu_model_runner",
            GPUModelRunner=GPUModelRunner,
            InputBatch=InputBatch,
            CachedRequestState=CachedRequestState,
        ),
        module("prometheus_client", Counter=Metric, Histogram=Metric, Gauge=Metric),
    ]
    for own in modules:
        monkeypatch.setitem(sys.modules, own.__name__, own)
        above, _, last = own.__name__.rpartition(".")
        if above:
            setattr(sys.modules[above], last, own)
    return sampler, GPUModelRunner
