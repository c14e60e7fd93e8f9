"""Put the hook of the V1 runner in place, once in a process, and prove that it is there."""

import atexit
import functools
from collections.abc import Callable
from typing import Any

from cactus_theory.vllm import versions
from cactus_theory.vllm.admission import Admission
from cactus_theory.vllm.checks import check_config
from cactus_theory.vllm.metrics import Prometheus, Reporter
from cactus_theory.vllm.requests import reporter_of
from cactus_theory.vllm.settings import Settings
from cactus_theory.vllm.v1 import Hook

PARAMETERS = (
    "draft_token_ids",
    "num_draft_tokens",
    "max_spec_len",
    "cu_num_draft_tokens",
    "draft_probs",
    "target_logits",
    "bonus_token_ids",
    "sampling_metadata",
)
SAMPLE = ("self", "logits", "spec_decode_metadata")
UPDATE = ("self", "scheduler_output")
METADATA = ("temperature", "all_greedy", "all_random", "generators")


def install(settings: Settings) -> Hook:
    """Replace and wrap vLLM's functions; a second call changes nothing.

    Raises
    ------
    UnknownVersion
        Names that differ from those that are relied on.
    """
    from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    found = getattr(module.rejection_sample, "__self__", None)
    if isinstance(found, Hook):
        return found
    check_names(module)
    prove_it_is_called(module)
    logger = init_logger("vllm.plugins.cactus_theory")
    hook = Hook(settings, module.rejection_sample, logger.warning)
    module.rejection_sample = hook.rejection_sample
    _wrap_runner(hook, logger.info)
    _wrap_ends(hook)
    _wrap_requests(hook.admission)
    _wrap_config(settings, logger.warning)
    return hook


def check_names(module: Any) -> None:
    """Raise UnknownVersion unless every name that is relied on is there."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.output import SchedulerOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample.metadata import SamplingMetadata  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.gpu_model_runner import (  # pyright: ignore[reportMissingImports]
        CachedRequestState,
        GPUModelRunner,
        InputBatch,
    )

    versions.require_parameters(module.rejection_sample, PARAMETERS, "rejection_sample")
    versions.require_names(module, ["RejectionSampler"], "rejection_sampler")
    versions.require_names(SamplingMetadata, METADATA, "SamplingMetadata")
    versions.require_names(GPUModelRunner, ["_sample", "_update_states"], "GPUModelRunner")
    where = "GPUModelRunner._update_states"
    versions.require_parameters(GPUModelRunner._update_states, UPDATE, where)
    versions.require_names(SchedulerOutput, ["finished_req_ids"], "SchedulerOutput")
    versions.require_parameters(GPUModelRunner._sample, SAMPLE, "GPUModelRunner._sample")
    versions.require_names(InputBatch, ["req_ids"], "InputBatch")
    versions.require_names(CachedRequestState, ["sampling_params"], "CachedRequestState")
    versions.require_names(SamplingParams, ["verify", "extra_args"], "SamplingParams")
    versions.require_names(EngineArgs, ["create_engine_config"], "EngineArgs")


def prove_it_is_called(module: Any) -> None:
    """Raise UnknownVersion unless the sampler looks the function up in its module, by name."""
    forward = module.RejectionSampler.forward
    named = "rejection_sample" in forward.__code__.co_names
    if not named or forward.__globals__ is not vars(module):
        raise versions.unknown("RejectionSampler.forward does not call rejection_sample")


def _wrap_runner(hook: Hook, log: Callable[[str], None]) -> None:
    """Tell the hook which runner samples, and stop an engine that does not call it."""
    from vllm.v1.worker.gpu_model_runner import (  # pyright: ignore[reportMissingImports]
        GPUModelRunner,
    )

    original = GPUModelRunner._sample

    @functools.wraps(original)
    def sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is None:
            return original(runner, logits, spec_decode_metadata)
        if hook.reporter is None:
            _begin(hook, log)
        before, hook.runner = hook.calls, runner
        try:
            output = original(runner, logits, spec_decode_metadata)
        finally:
            hook.runner = None
        if hook.calls == before:
            raise versions.unknown("a step with drafts did not call rejection_sample")
        return output

    GPUModelRunner._sample = sample


def _begin(hook: Hook, log: Callable[[str], None]) -> None:
    """Start counting: in the first of the processes that share a model, once it samples."""
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]
    from vllm.distributed import (  # pyright: ignore[reportMissingImports]
        get_tensor_model_parallel_rank,
    )

    hook.counts_here = get_tensor_model_parallel_rank() == 0
    interval = float(envs.VLLM_LOG_STATS_INTERVAL)
    hook.reporter = Reporter(Prometheus(hook.tally), log, interval)
    policy, verifier = hook.settings.policy.spec, hook.settings.verifier.spec
    log(f"cactus-theory: {policy} decides drafts here ({verifier})")
    if hook.counts_here:
        atexit.register(hook.reporter.finish)
        if hook.settings.readings:
            hook.write = reporter_of(hook.settings.readings, log)
            # the ends of the last requests are told with the next step, if there is one
            atexit.register(lambda: hook.end(list(hook.requests)))


def _wrap_ends(hook: Hook) -> None:
    """Tell the hook which requests have ended or were aborted."""
    from vllm.v1.worker.gpu_model_runner import (  # pyright: ignore[reportMissingImports]
        GPUModelRunner,
    )

    original = GPUModelRunner._update_states

    @functools.wraps(original)
    def update(runner: Any, scheduler_output: Any) -> Any:
        hook.end(scheduler_output.finished_req_ids)
        return original(runner, scheduler_output)

    GPUModelRunner._update_states = update


def _wrap_requests(admission: Admission) -> None:
    """Refuse a request that is not admitted when it is submitted."""
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

    original = SamplingParams.verify

    @functools.wraps(original)
    def verify(params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            admission.check(params)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        return original(params, *args, **kwargs)

    SamplingParams.verify = verify


def _wrap_config(settings: Settings, warn: Callable[[str], None]) -> None:
    """Refuse, before processes start, what would bypass the hook."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(engine_args, *args, **kwargs)
        check_config(config, warn, settings)
        return config

    EngineArgs.create_engine_config = create_engine_config
