"""What happens as a server starts: versions and settings are checked, and the V1 hook put in place.

What is replaced are functions that vLLM does not promise to keep. So nothing goes by version
numbers alone: before anything is replaced, names of parameters and fields are compared with those
that are relied on, and a mismatch stops the start-up with one line. :func:`check_config` looks at
what a server was asked for before its processes start.
"""

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch

from cactus_theory.vllm.admission import KEYS, PROCESSOR_KEYS, Admission
from cactus_theory.vllm.metrics import Prometheus, Reporter
from cactus_theory.vllm.settings import (
    CAP,
    READINGS,
    Settings,
    UnknownVersion,
    require_names,
    require_parameters,
    stop,
    unknown_version,
)
from cactus_theory.vllm.v1 import Hook, reporter_of

LAWFUL = "standard"  # the one ``rejection_sample_method`` that leaves the decision to the hook
# decides certain drafts of model runner V2
PROCESSOR = "cactus_theory.vllm.logits_processor:CactusLogitsProcessor"


def check_config(config: Any, warn: Callable[[str], None], settings: Settings) -> None:
    """Stop the start-up with one line where the hook would be bypassed or contradicted.

    That is: another ``rejection_sample_method``, a model runner V2 of an unknown version, a logits
    processor beside sampled drafts, a cap or readings of single requests that this runner does not
    keep, a CPU build that scales logits with memory it has not written (vLLM issue 55005). A server
    without drafts is let through with a warning: it emits the target's own law.
    """
    speculative = config.speculative_config
    if speculative is None:
        return warn("cactus-theory: CACTUS_POLICY is set and this server drafts nothing")
    if getattr(config, "use_v2_model_runner", False):
        for name, is_set in ((CAP, settings.cap is not None), (READINGS, settings.readings)):
            if is_set:
                stop(f"{name}: is kept by model runner V1 alone; set VLLM_USE_V2_MODEL_RUNNER=0")
        if loads_processor(config):
            return check_processor(config)
        require_hook(warn)
    method = getattr(speculative, "rejection_sample_method", LAWFUL)
    if method != LAWFUL:
        stop(
            f"rejection_sample_method must be {LAWFUL} with CACTUS_POLICY; got {method} "
            "(for blocks: CACTUS_VERIFIER=block)"
        )
    if not temperature_arrives():
        stop(
            "this CPU build of vllm scales logits with memory that it has not written "
            "(vLLM issue 55005), so its target law is not defined; serve a version with the fix"
        )


def loads_processor(config: Any) -> bool:
    """Return whether the logits processor decides this server's drafts."""
    loaded = getattr(config.model_config, "logits_processors", None) or ()
    named = any(PROCESSOR.rpartition(":")[2] in str(processor) for processor in loaded)
    return named and bool(getattr(config, "use_v2_model_runner", False))


def check_processor(config: Any) -> None:
    """Stop the start-up where a bias on logits would be another law."""
    from cactus_theory.vllm.certain import drafts_of

    try:
        drafts_of(config)
    except (ValueError, UnknownVersion) as error:
        stop(str(error))


def require_hook(warn: Callable[[str], None]) -> None:
    """Stop the start-up unless the hook of model runner V2 is in place."""
    from cactus_theory.vllm import v2

    if v2.installed() is not None:
        return warn("cactus-theory: drafts are decided on model runner V2; nothing is counted")
    why = "it is not installed"
    try:
        v2.known_functions()
    except (ImportError, UnknownVersion) as error:
        why = str(error)
    stop(
        f"no hook for model runner V2 ({why}); set VLLM_USE_V2_MODEL_RUNNER=0, or load "
        f"--logits-processors {PROCESSOR}"
    )


def temperature_arrives() -> bool:
    """Return whether a request's temperature reaches its rows, which is tried on a CPU only."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return True
    heat, ends = torch.tensor([0.7, 1.0, 2.5]), torch.tensor([2, 3, 5], dtype=torch.int32)
    try:
        expanded = module.expand_batch_to_tokens(heat, ends, 5)
    except Exception:  # its kernels are put in place when a worker starts; not here yet
        current_platform.register_triton_kernel_overrides()
        expanded = module.expand_batch_to_tokens(heat, ends, 5)
    return bool(torch.equal(expanded, heat.repeat_interleave(torch.tensor([2, 1, 2]))))


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
    hook = Hook(settings, module.rejection_sample, logger.warning)
    module.rejection_sample = hook.rejection_sample
    _wrap_runner(worker.GPUModelRunner, hook, logger.info)
    _wrap_ends(worker.GPUModelRunner, hook)
    _wrap_requests(hook.admission)
    _wrap_config(hook.admission, logger.warning)
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
    original = runner_class._sample

    @functools.wraps(original)
    def sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is None:
            return original(runner, logits, spec_decode_metadata)
        if hook.reporter is None:
            _begin(hook, log)
        calls_before, hook.runner = hook.calls, runner
        try:
            output = original(runner, logits, spec_decode_metadata)
        finally:
            hook.runner = None
        if hook.calls == calls_before:
            raise unknown_version("a step with drafts did not call rejection_sample")
        return output

    runner_class._sample = sample


def _begin(hook: Hook, log: Callable[[str], None]) -> None:
    """Start counting: in the first of the processes that share a model, once it samples."""
    import vllm.distributed as distributed  # pyright: ignore[reportMissingImports]
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    hook.counts_here = distributed.get_tensor_model_parallel_rank() == 0
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


def _wrap_ends(runner_class: Any, hook: Hook) -> None:
    """Tell the hook which requests have ended or were aborted."""
    original = runner_class._update_states

    @functools.wraps(original)
    def update(runner: Any, scheduler_output: Any) -> Any:
        hook.end(scheduler_output.finished_req_ids)
        return original(runner, scheduler_output)

    runner_class._update_states = update


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


def _wrap_config(admission: Admission, warn: Callable[[str], None]) -> None:
    """Refuse, before processes start, what would bypass the hook; learn what requests may say."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(engine_args, *args, **kwargs)
        check_config(config, warn, admission.settings)
        admission.keys = PROCESSOR_KEYS if loads_processor(config) else KEYS
        return config

    EngineArgs.create_engine_config = create_engine_config
