"""Install the hook in vLLM's model runner V1, and check the server's configuration.

The replaced functions are internal to vLLM and may change with any version. So a version number is
not enough: before a function is replaced, the names of its parameters and of the fields that the
hook uses are compared with the expected names. A difference stops the start-up with one line.
"""

import atexit
import os
from collections.abc import Callable
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch

from cactus_theory.vllm.accounts import reporter_of
from cactus_theory.vllm.compatibility import (
    require_names,
    require_parameters,
    served_name,
    stop,
    unknown_version,
    wrapped,
)
from cactus_theory.vllm.hook import Hook
from cactus_theory.vllm.metrics import Reporter
from cactus_theory.vllm.settings import Settings

# expected parameters of vLLM's ``rejection_sample``; the hook has these and passes others on
PARAMETERS = tuple(signature(Hook.rejection_sample).parameters)[1:-2]
SAMPLE = ("self", "logits", "spec_decode_metadata")
UPDATE = ("self", "scheduler_output")
FREE = ("self", "request")
ENDS = "cactus_ends"  # attribute that we add to a scheduler and to its output for a runner
PARTIAL = "discard_request_mask"  # runner's mask of requests whose prompt is not yet complete
METADATA = ("temperature", "all_greedy", "all_random", "generators")
LAWFUL = "standard"  # the only ``rejection_sample_method`` that calls the replaced function
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0: model runner V1; unset: vLLM chooses
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # folder through which a server's processes share counters


def install(settings: Settings) -> Hook:
    """Replace and wrap vLLM's functions; a second call changes nothing.

    Raises UnknownVersion if names in vLLM differ from the expected names. The functions are:

    * ``rejection_sample``, replaced by the hook;
    * ``GPUModelRunner._sample`` and ``_update_states``, wrapped to pass the hook the running and
      the ended requests;
    * with readings, ``Scheduler._free_request`` and ``schedule``, wrapped to record why a request
      ended and at which length;
    * ``SamplingParams.verify`` and ``EngineArgs.create_engine_config``, wrapped to reject requests
      and configurations that are not allowed.
    """
    import vllm.v1.worker.gpu_model_runner as worker  # pyright: ignore[reportMissingImports]
    from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    hook_in_place = getattr(module.rejection_sample, "__self__", None)
    if isinstance(hook_in_place, Hook):
        return hook_in_place
    check_names(module, worker)
    logger = init_logger("vllm.plugins.cactus_theory")
    hook = Hook(settings, module.rejection_sample, logger.warning)
    module.rejection_sample = hook.rejection_sample
    _wrap_runner(worker.GPUModelRunner, hook, logger.info)
    _wrap_front(settings, logger.warning, logger.info)
    if settings.readings:
        _wrap_scheduler(hook)
    return hook


def check_names(module: Any, worker: Any) -> None:
    """Raise UnknownVersion unless vLLM has every name that the hook uses.

    UnknownVersion is also raised unless the sampler looks ``rejection_sample`` up in its module by
    name: otherwise the replacement would never be called.
    """
    from vllm.config import VllmConfig  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.output import SchedulerOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample.metadata import SamplingMetadata  # pyright: ignore[reportMissingImports]

    runner = worker.GPUModelRunner
    require_parameters(module.rejection_sample, PARAMETERS)
    require_names(module, "RejectionSampler")
    require_names(SamplingMetadata, *METADATA)
    require_names(runner, "_sample", "_update_states")
    require_parameters(runner._update_states, UPDATE)
    require_names(SchedulerOutput, "finished_req_ids")
    require_parameters(runner._sample, SAMPLE)
    require_names(worker.InputBatch, "req_ids")
    require_names(worker.CachedRequestState, "sampling_params")
    require_names(SamplingParams, "verify", "extra_args")
    require_names(EngineArgs, "create_engine_config")
    require_names(VllmConfig, "use_v2_model_runner")
    forward = module.RejectionSampler.forward
    is_named = "rejection_sample" in forward.__code__.co_names
    if not is_named or forward.__globals__ is not vars(module):
        raise unknown_version("RejectionSampler.forward does not call rejection_sample")


def _wrap_runner(runner_class: Any, hook: Hook, log: Callable[[str], None]) -> None:
    """Wrap the runner so that the hook gets the sampling runner and the ended requests.

    An engine that verifies drafts without calling the hook is stopped.
    """

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

    @wrapped(runner_class, "_update_states")
    def update(original: Any, runner: Any, scheduler_output: Any) -> Any:
        hook.end(scheduler_output.finished_req_ids, getattr(scheduler_output, ENDS, None))
        return original(runner, scheduler_output)


def _begin(hook: Hook, config: Any, log: Callable[[str], None]) -> None:
    """Start the counters, at the first step; only tensor-parallel rank 0 counts."""
    import vllm.distributed as distributed  # pyright: ignore[reportMissingImports]
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    hook.counts_here = distributed.get_tensor_model_parallel_rank() == 0
    interval, hook.model = float(envs.VLLM_LOG_STATS_INTERVAL), served_name(config)
    engine = getattr(config.parallel_config, "data_parallel_index", 0)
    hook.reporter = Reporter(hook.tally, log, interval, model=hook.model, engine=engine)
    if hook.counts_here:
        atexit.register(hook.reporter.finish)
        if hook.settings.readings:
            hook.write = reporter_of(hook.settings.readings, log, hook.warn)
            # vLLM reports an end with the next step; the last requests may have no next step
            atexit.register(lambda: hook.end(list(hook.requests), hook.last_ends))


def _wrap_scheduler(hook: Hook) -> None:
    """Add to the scheduler's output why requests have ended, and at which length.

    Raises UnknownVersion if names in vLLM differ from the expected names.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
    from vllm.v1.request import Request  # pyright: ignore[reportMissingImports]

    require_parameters(Scheduler._free_request, FREE)
    require_names(Scheduler, "schedule")
    require_names(Request, "get_finished_reason", "num_output_tokens")

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


def _wrap_front(
    settings: Settings, warn: Callable[[str], None], log: Callable[[str], None]
) -> None:
    """Check each request when it is submitted, and the server's configuration before it starts.

    The settings are logged once.
    """
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]

    info_is_shown = False

    @wrapped(SamplingParams, "verify")
    def verify(original: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            settings.grant(params)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
        return original(params, *args, **kwargs)

    @wrapped(EngineArgs, "create_engine_config")
    def create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal info_is_shown
        config = original(engine_args, *args, **kwargs)
        check_config(config, warn)
        if config.speculative_config is not None and not info_is_shown:
            show_info(settings, config, log, warn)
            info_is_shown = True
        return config


def check_config(config: Any, warn: Callable[[str], None]) -> None:
    """Stop the start-up with one line if the configuration bypasses or contradicts the hook.

    A server without drafts may start, with a warning: its tokens have the target distribution.
    """
    if config.use_v2_model_runner:
        stop(
            f"{RUNNER}: must be 0 with CACTUS_POLICY, whose hook is in model runner V1 alone; "
            f"got {os.environ.get(RUNNER, 'no value')}, with which vLLM takes model runner V2"
        )
    if config.speculative_config is None:
        return warn("cactus-theory: CACTUS_POLICY is set and this server drafts nothing")
    method = getattr(config.speculative_config, "rejection_sample_method", LAWFUL)
    if method != LAWFUL:
        stop(
            f"rejection_sample_method must be {LAWFUL} with CACTUS_POLICY; got {method} "
            "(for blocks: CACTUS_VERIFIER=block)"
        )
    if not _temperature_arrives():
        stop(
            "this CPU build of vllm scales logits with memory that it has not written "
            "(vLLM issue 55005), so its target law is not defined; serve a version with the fix"
        )


def _temperature_arrives() -> bool:
    """Return whether vLLM applies requests' temperatures to rows: tested on a CPU, else True."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return True
    heat, ends = torch.tensor([0.7, 1.0, 2.5]), torch.tensor([2, 3, 5], dtype=torch.int32)
    try:
        expanded = module.expand_batch_to_tokens(heat, ends, 5)
    except Exception:  # vLLM installs the CPU kernels when a worker starts, so not yet here
        current_platform.register_triton_kernel_overrides()
        expanded = module.expand_batch_to_tokens(heat, ends, 5)
    return bool(torch.equal(expanded, heat.repeat_interleave(torch.tensor([2, 1, 2]))))


def show_info(
    settings: Settings, config: Any, log: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Set the gauge ``cactus:info``, log the settings, and warn if /metrics will lack counters."""
    import prometheus_client as client  # pyright: ignore[reportMissingImports]
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    labels = {
        "version": version("cactus-theory"),
        "policy": settings.policy.spec,
        "verifier": settings.verifier.spec,
        "cap": "none" if settings.cap is None else f"{settings.cap:g}",
        "meter": str(settings.meter or "off"),
        "policies": ", ".join(settings.policies),
    }
    text, names = "What cactus-theory was asked for", [*labels, "model_name"]
    gauge = client.Gauge("cactus:info", text, names, multiprocess_mode="mostrecent")
    gauge.labels(**labels, model_name=served_name(config)).set(1)
    logged = labels | {"readings": settings.readings or "off"}
    log("cactus-theory decides drafts: " + ", ".join(" ".join(pair) for pair in logged.items()))
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING and not os.environ.get(SHARED):
        warn(
            "cactus-theory: /metrics will not show the counters, which stay in the engine's own "
            f"process: set {SHARED} to an empty folder"
        )
