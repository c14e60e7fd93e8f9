"""Put the hook of model runner V1 in place, as a process starts.

What is replaced are functions that vLLM does not promise to keep. So nothing goes by version
numbers alone: before anything is replaced, names of parameters and fields are compared with those
that are relied on, and a mismatch stops the start-up with one line. What a server was asked for is
looked at in :mod:`cactus_theory.vllm.configuration`, before its processes start.
"""

import atexit
from collections.abc import Callable
from typing import Any

from cactus_theory.vllm.admission import OF_HOOK, OF_PROCESSOR, Admission
from cactus_theory.vllm.configuration import check_config, names_processor, served_name, show_info
from cactus_theory.vllm.metrics import Prometheus, Reporter
from cactus_theory.vllm.model_runner_v1 import Hook
from cactus_theory.vllm.replace import require_names, require_parameters, unknown_version, wrapped
from cactus_theory.vllm.requests import reporter_of

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
FREE = ("self", "request")
ENDS = "cactus_ends"  # our own attribute of a scheduler and of what it tells a runner
PARTIAL = "discard_request_mask"  # of a runner: requests whose prompts go on after this step
METADATA = ("temperature", "all_greedy", "all_random", "generators")


def install(admission: Admission) -> Hook:
    """Replace and wrap vLLM's functions; a second call changes nothing.

    UnknownVersion if names differ from those that are relied on.
    """
    import vllm.v1.worker.gpu_model_runner as worker  # pyright: ignore[reportMissingImports]
    from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    hook_in_place = getattr(module.rejection_sample, "__self__", None)
    if isinstance(hook_in_place, Hook):
        return hook_in_place
    check_names(module, worker)
    prove_it_is_called(module)
    logger = init_logger("vllm.plugins.cactus_theory")
    hook = Hook(admission, module.rejection_sample, logger.warning)
    module.rejection_sample = hook.rejection_sample
    _wrap_runner(worker.GPUModelRunner, hook, logger.info)
    _wrap_ends(worker.GPUModelRunner, hook)
    _wrap_requests(admission)
    _wrap_config(admission, logger.warning, logger.info)
    if admission.settings.readings:
        _wrap_scheduler(hook)
    return hook


def check_names(module: Any, worker: Any) -> None:
    """Raise UnknownVersion unless every name that is relied on is there."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.output import SchedulerOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample.metadata import SamplingMetadata  # pyright: ignore[reportMissingImports]

    runner = worker.GPUModelRunner
    require_parameters(module.rejection_sample, PARAMETERS, "rejection_sample")
    require_names(module, ["RejectionSampler"], "rejection_sampler")
    require_names(SamplingMetadata, METADATA, "SamplingMetadata")
    require_names(runner, ["_sample", "_update_states"], "GPUModelRunner")
    require_parameters(runner._update_states, UPDATE, "GPUModelRunner._update_states")
    require_names(SchedulerOutput, ["finished_req_ids"], "SchedulerOutput")
    require_parameters(runner._sample, SAMPLE, "GPUModelRunner._sample")
    require_names(worker.InputBatch, ["req_ids"], "InputBatch")
    require_names(worker.CachedRequestState, ["sampling_params"], "CachedRequestState")
    require_names(SamplingParams, ["verify", "extra_args"], "SamplingParams")
    require_names(EngineArgs, ["create_engine_config"], "EngineArgs")


def prove_it_is_called(module: Any) -> None:
    """Raise UnknownVersion unless the sampler looks the function up in its module, by name."""
    forward = module.RejectionSampler.forward
    is_named = "rejection_sample" in forward.__code__.co_names
    if not is_named or forward.__globals__ is not vars(module):
        raise unknown_version("RejectionSampler.forward does not call rejection_sample")


def _wrap_runner(runner_class: Any, hook: Hook, log: Callable[[str], None]) -> None:
    """Tell the hook which runner samples, and stop an engine that does not call it."""

    @wrapped(runner_class, "_sample")
    def sample(original: Any, runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if hook.reporter is None:
            if not hasattr(runner, PARTIAL):
                raise unknown_version(f"GPUModelRunner has no {PARTIAL}")
            _begin(hook, runner.vllm_config, log)
        if spec_decode_metadata is None:
            hook.meet(runner)
            return original(runner, logits, spec_decode_metadata)
        calls_before, hook.runner = hook.calls, runner
        try:
            output = original(runner, logits, spec_decode_metadata)
        finally:
            hook.runner = None
        if hook.calls == calls_before:
            raise unknown_version("a step with drafts did not call rejection_sample")
        return output


def _begin(hook: Hook, config: Any, log: Callable[[str], None]) -> None:
    """Start counting: in the first of the processes that share a model, once it samples."""
    import vllm.distributed as distributed  # pyright: ignore[reportMissingImports]
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    hook.counts_here = distributed.get_tensor_model_parallel_rank() == 0
    interval = float(envs.VLLM_LOG_STATS_INTERVAL)
    hook.model = served_name(config)
    engine = getattr(config.parallel_config, "data_parallel_index", 0)
    hook.reporter = Reporter(Prometheus(hook.tally, hook.model, engine), log, interval)
    if hook.counts_here:
        atexit.register(hook.reporter.finish)
        if hook.settings.readings:
            hook.write = reporter_of(hook.settings.readings, log, hook.warn)
        if hook.settings.trace:
            from cactus_theory.vllm.recorder import Recorder

            hook.recorder = Recorder(hook.settings, config, hook.warn_once)
        if hook.settings.readings or hook.settings.trace:
            # the ends of the last requests are told with the next step, if there is one
            atexit.register(lambda: hook.end(list(hook.requests), hook.last_ends))


def _wrap_ends(runner_class: Any, hook: Hook) -> None:
    @wrapped(runner_class, "_update_states")
    def update(original: Any, runner: Any, scheduler_output: Any) -> Any:
        hook.end(scheduler_output.finished_req_ids, getattr(scheduler_output, ENDS, None))
        return original(runner, scheduler_output)


def _wrap_scheduler(hook: Hook) -> None:
    """Let what the scheduler tells the runner say why requests have ended, and at which length.

    UnknownVersion if names differ from those that are relied on.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
    from vllm.v1.request import Request  # pyright: ignore[reportMissingImports]

    require_parameters(Scheduler._free_request, FREE, "Scheduler._free_request")
    require_names(Scheduler, ["schedule"], "Scheduler")
    require_names(Request, ["get_finished_reason", "num_output_tokens"], "Request")

    @wrapped(Scheduler, "_free_request")
    def freed(free: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        ends = hook.last_ends = vars(scheduler).setdefault(ENDS, {})
        ends[request.request_id] = str(request.get_finished_reason()), request.num_output_tokens
        return free(scheduler, request, *args, **kwargs)

    @wrapped(Scheduler, "schedule")
    def scheduled(schedule: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        setattr(output, ENDS, vars(scheduler).pop(ENDS, {}))
        return output


def _wrap_requests(admission: Admission) -> None:
    """Refuse a request that is not admitted when it is submitted."""
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

    @wrapped(SamplingParams, "verify")
    def verify(original: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            admission.grant(params)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        return original(params, *args, **kwargs)


def _wrap_config(
    admission: Admission, warn: Callable[[str], None], log: Callable[[str], None]
) -> None:
    """Refuse, before processes start, what would bypass the hook; say once what was asked for.

    Which way serves requests is known from the configuration alone.
    """
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    said = []

    @wrapped(EngineArgs, "create_engine_config")
    def create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(engine_args, *args, **kwargs)
        check_config(config, warn, admission.settings)
        admission.keys = OF_PROCESSOR if names_processor(config) else OF_HOOK
        if config.speculative_config is not None and not said:
            show_info(admission.settings, config, log, warn)
            said.append(True)
        return config
