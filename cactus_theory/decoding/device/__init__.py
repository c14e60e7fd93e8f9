"""The decode loop for a GPU: a round is one function of tensors that never change their place.

The host uploads each text's last two tokens, its length and its coins; the device drafts K
tokens, runs the target over K + 1 positions and verifies; the host reads ids and counts, once
a round. Shapes depend on nothing that is drafted: every row drafts K tokens and runs to the end
of the round, whatever it may still take, and texts that have ended run along, unused.

Attention covers the cache up to a multiple of ``BUCKET`` positions that holds every text, under a
mask that the device makes from the lengths. So on CUDA a round is one graph per bucket,
captured when a text first gets there: a bucket of 256 reads at most 255 positions too many, 2 % of
the bytes of a pass of an 8B model over a short text. Without CUDA the same functions run as they
are, which is how they are tested.

Up to rounding it is the loop of :func:`cactus_theory.generate`: the same coins, tokens,
statistics and meter. Where the fused kernels verify, which is on CUDA where they can, their
random numbers are their own: the same laws and meter, other tokens.
"""

import math
from typing import Any

from cactus_theory.base.rows import ORDINARY
from cactus_theory.decoding._prepare import Opening
from cactus_theory.decoding.device.loop import DeviceRounds, capacity
from cactus_theory.decoding.device.round import captures
from cactus_theory.decoding.device.verify import VerifyStep, kernel_step, obstacle
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models import longest_text, text_config
from cactus_theory.decoding.models.recognised import obstacle as not_fast
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.schedule import OnePolicy

BY_KERNELS = "device, by kernels"


def on_device(opening: Opening) -> tuple[DeviceRounds | None, str]:
    """Return the device's decode if it is to run, and the name of the loop for the result.

    Raises ValueError where it, or the kernels, are required and cannot run.
    """
    device_loop, texts = opening.options.device_loop, opening.texts
    if device_loop is False or (device_loop is None and not captures(texts.device)):
        return None, "host"
    drafter, models = opening.drafter, {"target_model": opening.target_model}
    if isinstance(drafter, ModelDrafter):
        models["draft_model"] = drafter.model
    longest = longest_text(models.get("draft_model", opening.target_model))
    reason = (
        ("where the draft has fewer positions" if (longest or math.inf) < texts.capacity else None)
        or _round_obstacle(opening)
        or _option_obstacle(opening.options)
        or _model_obstacle(models, capacity(texts, opening.width))
    )
    if reason is None:
        step, loop = _step(opening, list(models.values()))
        return DeviceRounds(opening, step), loop
    if device_loop:
        raise ValueError(f"device_loop: must be None or False here, {reason}; got {device_loop!r}")
    return None, f"host, {reason}"


def _step(opening: Opening, models: list[Any]) -> tuple[VerifyStep | None, str]:
    """Return the kernels' step where it is to verify, and the name of the loop for the result."""
    options, policies, coins = opening.options, opening.policies.distinct, opening.coins
    device_loop, judge, temperature = options.device_loop, options.judge, options.temperature
    if device_loop == "torch" or (device_loop != "kernels" and not captures(coins.device)):
        return None, "device"
    reason = obstacle(policies, judge, models, coins.device)
    if temperature and not ORDINARY[0] <= temperature <= ORDINARY[1]:
        reason = f"as they do not divide by a temperature of {temperature:g}"
    if reason is None:
        vocab = text_config(models[0]).vocab_size
        seeds, width = coins.seeds(), opening.width
        return kernel_step(policies[0], judge.spec, seeds, temperature, width, vocab), BY_KERNELS
    if device_loop == "kernels":
        raise ValueError(f"device_loop: must not be 'kernels' here, {reason}")
    return None, f"device, by torch {reason}"


def _round_obstacle(opening: Opening) -> str | None:
    """Return why this decode cannot run as one captured round, in words, or None."""
    judge = opening.options.judge
    drafter = opening.drafter
    if drafter is not None and not (
        isinstance(drafter, ModelDrafter) and not drafter.greedy and drafter.stop is None
    ):
        return "where a drafter is more than a model"
    if opening.warp.processors.all:
        return "where logits processors apply"
    if any(not isinstance(own.schedule, OnePolicy) for own in opening.policies.followed):
        return "where a schedule chooses policies"
    if judge.drafts != ("chain",):
        return f"where {judge.spec} may walk trees"
    if judge.needs_next_draft_row:
        return f"where {judge.spec} reads one more draft row"
    return None


def _option_obstacle(options: DecodeOptions) -> str | None:
    """Return the given options that the device loop lacks, in words, or None."""
    names = ["record_rows"] * options.record_rows
    names += [name for name in ("on_rows", "on_round") if getattr(options.callbacks, name)]
    names += ["fast_forward"] * (options.fast_forward is False)
    names += ["stop"] * (options.stop is not None)
    return f"where {', '.join(names)} is used" if names else None


def _model_obstacle(models: dict[str, Any], positions: int) -> str | None:
    if len({text_config(model).vocab_size for model in models.values()}) > 1:
        return "where the draft's vocabulary has another size"
    for name, model in models.items():
        reason = not_fast(model, positions)
        if reason is not None:
            return f"as to {name}, {reason}"
    return None
