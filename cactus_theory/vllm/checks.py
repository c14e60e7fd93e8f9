"""What a server must be for a policy to decide its drafts; looked at before processes start."""

from collections.abc import Callable
from typing import Any

import torch

from cactus_theory.vllm import versions
from cactus_theory.vllm.settings import CAP, READINGS, Settings

LAWFUL = "standard"  # the one ``rejection_sample_method`` that leaves the decision to the hook
# decides certain drafts of model runner V2
PROCESSOR = "cactus_theory.vllm.logits_processor:CactusLogitsProcessor"


def check_config(config: Any, warn: Callable[[str], None], settings: Settings) -> None:
    """Stop the start-up with one line where the hook would be bypassed or contradicted.

    A server without drafts is let through with a warning: it emits the target's own law.

    Raises
    ------
    SystemExit
        Another ``rejection_sample_method``, a model runner V2 of an unknown version, a logits
        processor beside sampled drafts, a cap or readings of single requests that this runner
        does not keep, a CPU build that scales logits with memory it has not written (vLLM issue
        55005).
    """
    speculative = config.speculative_config
    if speculative is None:
        return warn("cactus-theory: CACTUS_POLICY is set and this server drafts nothing")
    second = getattr(config, "use_v2_model_runner", False)
    if second:
        require_no_accounts(settings)
    if second and has_processor(config):
        return check_processor(config)
    if second:
        require_hook(warn)
    method = getattr(speculative, "rejection_sample_method", LAWFUL)
    if method != LAWFUL:
        stop(
            f"rejection_sample_method must be {LAWFUL} with CACTUS_POLICY; got {method} "
            "(for blocks: CACTUS_VERIFIER=block)"
        )
    if on_cpu() and not temperature_arrives():
        stop(
            "this CPU build of vllm scales logits with memory that it has not written "
            "(vLLM issue 55005), so its target law is not defined; serve a version with the fix"
        )


def check_processor(config: Any) -> None:
    """Stop the start-up where a bias on logits would be another law."""
    from cactus_theory.vllm.certain import drafts_of

    try:
        drafts_of(config)
    except (ValueError, versions.UnknownVersion) as error:
        stop(str(error))


def require_no_accounts(settings: Settings) -> None:
    """Stop the start-up of model runner V2 where single requests are to be kept account of."""
    for name, given in ((CAP, settings.cap is not None), (READINGS, settings.readings)):
        if given:
            stop(f"{name}: is kept by model runner V1 alone; set VLLM_USE_V2_MODEL_RUNNER=0")


def require_hook(warn: Callable[[str], None]) -> None:
    """Stop the start-up unless the hook of model runner V2 is in place."""
    from cactus_theory.vllm import v2

    if v2.installed() is not None:
        return warn("cactus-theory: drafts are decided on model runner V2; nothing is counted")
    why = "it is not installed"
    try:
        v2.known_functions()
    except (ImportError, versions.UnknownVersion) as error:
        why = str(error)
    stop(
        f"no hook for model runner V2 ({why}); set VLLM_USE_V2_MODEL_RUNNER=0, or load "
        f"--logits-processors {PROCESSOR}"
    )


def has_processor(config: Any) -> bool:
    """Return whether the server loads this package's logits processor."""
    loaded = getattr(config.model_config, "logits_processors", None) or ()
    return any(PROCESSOR.rpartition(":")[2] in str(own) for own in loaded)


def stop(line: str) -> None:
    """End the process with one line: what a plugin raises besides is logged, or a traceback."""
    raise SystemExit(f"cactus-theory: {line}")


def on_cpu() -> bool:
    """Return whether vLLM computes on a CPU."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    return bool(current_platform.is_cpu())


def temperature_arrives() -> bool:
    """Return whether a request's temperature reaches its rows."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler as module  # pyright: ignore[reportMissingImports]

    heat, ends = torch.tensor([0.7, 1.0, 2.5]), torch.tensor([2, 3, 5], dtype=torch.int32)
    try:
        seen = module.expand_batch_to_tokens(heat, ends, 5)
    except Exception:  # its kernels are put in place when a worker starts; not here yet
        current_platform.register_triton_kernel_overrides()
        seen = module.expand_batch_to_tokens(heat, ends, 5)
    return bool(torch.equal(seen, heat.repeat_interleave(torch.tensor([2, 1, 2]))))
