"""The decode loop for a GPU: a round is one function of tensors at fixed addresses.

In each round the host uploads every text's last two tokens, length and coins. The device drafts K
tokens, runs the target over K + 1 positions and verifies. The host then reads ids and counts, once
per round. Shapes do not depend on the drafted tokens: every text drafts K tokens, even if it has
room for fewer, and texts that have ended stay in the batch, with unused results.

Attention reads as many positions of the cache as all texts need, rounded up to a multiple of
``BUCKET``, under a mask that the device makes from the lengths. So on CUDA there is one graph of a
round for each multiple, captured when a text first needs the multiple. A bucket of 256 reads at
most 255 positions too many, 2 % of the bytes of a pass of an 8B model over a short text. Without
CUDA the functions run without a graph, which is how tests run them.

Up to rounding, coins, tokens, statistics and meter are those of the host loop. If the fused kernels
verify, as they do on CUDA where they support the decode, the emitted laws and the meter are the
same, but the kernels' random numbers, and so the tokens, are different.
"""

import math
from collections.abc import Iterator
from typing import Any

from cactus_theory.decoding.coins import seeds_of
from cactus_theory.decoding.device.host_side import DeviceRounds, capacity
from cactus_theory.decoding.device.round import captures
from cactus_theory.decoding.device.verify import VerifyStep, kernel_step, obstacle
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models import longest_text, text_config
from cactus_theory.decoding.models.recognised import obstacle as not_fast
from cactus_theory.decoding.prepare import Opening
from cactus_theory.decoding.schedule import OnePolicy

BY_KERNELS = "device, by kernels"


def on_device(opening: Opening) -> tuple[DeviceRounds | None, str]:
    """Return the device loop, or None to use the host loop, and the loop's name for the result.

    Raises ValueError if the device loop or the kernels are required and do not support the decode.
    """
    device_loop, texts = opening.options.device_loop, opening.texts
    if device_loop is False or (device_loop is None and not captures(texts.device)):
        return None, "host"
    models = {"target_model": opening.target_model}
    if isinstance(opening.drafter, ModelDrafter):
        models["draft_model"] = opening.drafter.model
    reason = next(_obstacles(opening, models), None)
    if reason is None:
        step, loop = _step(opening, list(models.values()))
        return DeviceRounds(opening, step), loop
    if device_loop:
        raise ValueError(f"device_loop: must be None or False here, {reason}; got {device_loop!r}")
    return None, f"host, {reason}"


def _step(opening: Opening, models: list[Any]) -> tuple[VerifyStep | None, str]:
    """Return the step that verifies by kernels, None to verify in PyTorch, and the loop's name."""
    options, policies, device = opening.options, opening.policies, opening.texts.device
    device_loop, temperature = options.device_loop, options.temperature
    verifier = options.parsed_verifier
    if device_loop == "torch" or (device_loop != "kernels" and not captures(device)):
        return None, "device"
    reason = obstacle(policies, verifier, models, device, temperature)
    if reason is None:
        vocab = text_config(models[0]).vocab_size
        seeds, width = seeds_of(opening.texts), opening.width
        return kernel_step(policies[0], verifier.spec, seeds, temperature, width, vocab), BY_KERNELS
    if device_loop == "kernels":
        raise ValueError(f"device_loop: must not be 'kernels' here, {reason}")
    return None, f"device, by torch {reason}"


def _obstacles(opening: Opening, models: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons, in words, why the device loop does not support this decode."""
    drafter, options, texts = opening.drafter, opening.options, opening.texts
    longest = longest_text(models.get("draft_model", opening.target_model)) or math.inf
    if longest < texts.capacity:
        yield "where the draft has fewer positions"
    plain = isinstance(drafter, ModelDrafter) and not drafter.greedy and drafter.stop is None
    if drafter is not None and not plain:
        yield "where a drafter is more than a model"
    if opening.warp.soft:
        yield f"where {opening.policies[0].spec} relaxes greedy decoding"
    if opening.warp.processors.all:
        yield "where logits processors apply"
    if any(not isinstance(text.rule.schedule, OnePolicy) for text in texts.all):
        yield "where a schedule chooses policies"
    if options.parsed_verifier.drafts != ("chain",):
        yield f"where {options.parsed_verifier.spec} may walk trees"
    is_used = {
        "record_rows": options.record_rows,
        "on_rows": options.callbacks.on_rows,
        "on_round": options.callbacks.on_round,
        "fast_forward": options.fast_forward is False,
        "stop": options.stop is not None,
    }
    names = [name for name, used in is_used.items() if used]
    if names:
        yield f"where {', '.join(names)} is used"
    if len({text_config(model).vocab_size for model in models.values()}) > 1:
        yield "where the draft's vocabulary has another size"
    for name, model in models.items():
        if (reason := not_fast(model, capacity(texts, opening.width))) is not None:
            yield f"as to {name}, {reason}"
