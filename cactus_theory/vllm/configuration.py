"""Look at what a server is to be before its processes start, and say what was asked for."""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from cactus_theory.vllm.replace import TESTED_V2, UnknownVersion, require_names, stop
from cactus_theory.vllm.settings import MARGIN, Settings, refuse_accounts

LAWFUL = "standard"  # the one ``rejection_sample_method`` that leaves the decision to the hook
CONFIG = ("draft_sample_method", "rejection_sample_method", "num_speculative_tokens")
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # where processes of a server share counters
# logits processor that decides deterministic drafts of model runner V2
PROCESSOR = "cactus_theory.vllm.logits_processor:CactusLogitsProcessor"


def check_config(config: Any, warn: Callable[[str], None], settings: Settings) -> None:
    """Stop the start-up with one line where the hook would be bypassed or contradicted.

    That is: another ``rejection_sample_method``, a model runner V2 of an unknown version, a logits
    processor beside sampled drafts or on model runner V1, a margin without a logits processor, a
    cap or readings that this runner does not keep, a CPU build that scales logits with memory it
    has not written (vLLM issue 55005). A server without drafts is let through with a warning: it
    emits the target's own law.
    """
    speculative, on_v2 = config.speculative_config, getattr(config, "use_v2_model_runner", False)
    if names_processor(config) and not on_v2:
        stop(
            "CactusLogitsProcessor is for model runner V2, and this server has V1, where "
            "CACTUS_POLICY alone decides drafts: leave --logits-processors out"
        )
    if settings.margin and not names_processor(config):
        stop(f"{MARGIN}: does nothing without --logits-processors {PROCESSOR}; unset it")
    if speculative is None:
        return warn("cactus-theory: CACTUS_POLICY is set and this server drafts nothing")
    if on_v2:
        try:
            refuse_accounts(settings.cap is not None, settings.readings, settings.trace)
            if names_processor(config):
                drafts_of(config)
                return None
        except (ValueError, UnknownVersion) as error:
            stop(str(error))
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


def drafts_of(vllm_config: Any) -> int:
    """Return the most tokens that are drafted, 0 without speculation.

    ValueError for drafts that are sampled and for an engine whose own method is not lossless.
    """
    drafts = vllm_config.speculative_config
    if drafts is None:
        return 0
    require_names(drafts, CONFIG, "SpeculativeConfig", TESTED_V2)
    if drafts.draft_sample_method != "greedy":
        raise ValueError(
            "draft_sample_method: must be greedy for CactusLogitsProcessor, since a biased logit "
            f"is the law of deterministic drafts alone; got {drafts.draft_sample_method!r}"
        )
    if drafts.rejection_sample_method not in ("standard", "block"):
        raise ValueError(
            "rejection_sample_method: must be standard or block for CactusLogitsProcessor, since "
            f"the engine has to be lossless; got {drafts.rejection_sample_method!r}"
        )
    return drafts.num_speculative_tokens


def names_processor(config: Any) -> bool:
    """Return whether the server is to load the logits processor."""
    loaded = getattr(config.model_config, "logits_processors", None) or ()
    return any(PROCESSOR.rpartition(":")[2] in str(processor) for processor in loaded)


def require_hook(warn: Callable[[str], None]) -> None:
    """Stop the start-up unless the hook of model runner V2 is in place."""
    from cactus_theory.vllm import model_runner_v2

    if model_runner_v2.installed() is not None:
        return warn("cactus-theory: drafts are decided on model runner V2; nothing is counted")
    why = "it is not installed"
    try:
        model_runner_v2.known_functions()
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


def info_of(settings: Settings) -> dict[str, str]:
    """Return a server's settings as labels of ``cactus:info``."""
    return {
        "version": version("cactus-theory"),
        "policy": settings.policy.spec,
        "verifier": settings.verifier.spec,
        "cap": "none" if settings.cap is None else f"{settings.cap:g}",
        "meter": str(settings.meter or "off"),
        "policies": ", ".join(settings.policies) or "none",
        "divergence": settings.divergence.spec,
        "margin": f"{settings.margin:g}",
    }


def show_info(
    settings: Settings, config: Any, log: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Set the gauge ``cactus:info``, log its labels and paths, warn of counters nobody sees."""
    import prometheus_client as client  # pyright: ignore[reportMissingImports]
    import vllm.envs as envs  # pyright: ignore[reportMissingImports]

    labels = info_of(settings)
    gauge = client.Gauge(
        "cactus:info", "What cactus-theory was asked for", [*labels, "model_name"],
        multiprocess_mode="mostrecent",
    )  # fmt: skip
    gauge.labels(**labels, model_name=served_name(config)).set(1)
    said = labels | {"readings": settings.readings or "off", "trace": settings.trace or "off"}
    log("cactus-theory decides drafts: " + ", ".join(" ".join(pair) for pair in said.items()))
    apart = envs.VLLM_ENABLE_V1_MULTIPROCESSING and not os.environ.get(SHARED)
    if apart and not getattr(config, "use_v2_model_runner", False):
        warn(
            "cactus-theory: /metrics will not show the counters, which stay in the engine's own "
            f"process: set {SHARED} to an empty folder"
        )


def served_name(config: Any) -> str:
    """Return the name that vLLM serves a model by, its label ``model_name``."""
    return str(config.model_config.served_model_name)
