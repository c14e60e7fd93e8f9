"""Whether the device loop runs a decode, what verifies in it, and why it cannot."""

from typing import Any

from cactus_theory.base.rows import ORDINARY
from cactus_theory.decoding._decode import Opening
from cactus_theory.decoding.device.capture import captures
from cactus_theory.decoding.device.loop import DeviceDecode, capacity
from cactus_theory.decoding.device.verify import VerifyStep, kernel_step, obstacle
from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.fast import obstacle as not_fast
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.pace import FixedPace

BY_KERNELS = "device, by kernels"


def on_device(opening: Opening) -> tuple[DeviceDecode | None, str]:
    """Return the device's decode if it is to run, and what a result says of its loop.

    Raises
    ------
    ValueError
        It is wanted, or the kernels are, and cannot run.
    """
    wanted, texts = opening.options.device_loop, opening.texts
    if wanted is False or (wanted is None and not captures(texts.device)):
        return None, "host"
    drafter, models = opening.drafter, {"target_model": opening.target_model}
    if isinstance(drafter, ModelDrafter):
        models["draft_model"] = drafter.model
    reason = (
        _unlike(opening)
        or _watched(opening.options)
        or _unfit(models, capacity(texts, opening.width))
    )
    if reason is None:
        step, loop = _step(opening, list(models.values()))
        return DeviceDecode(opening, step), loop
    if wanted:
        raise ValueError(f"device_loop: must be None or False here, {reason}; got {wanted!r}")
    return None, f"host, {reason}"


def _step(opening: Opening, models: list[Any]) -> tuple[VerifyStep | None, str]:
    """Return the kernels' step where it is to verify, and what a result says of the loop."""
    options, rules, coins = opening.options, opening.rules.rules, opening.coins
    wanted, judge, heat = options.device_loop, options.judge, options.temperature
    if wanted == "torch" or (wanted != "kernels" and not captures(coins.device)):
        return None, "device"
    reason = obstacle(rules, judge, models, coins.device)
    if heat and not ORDINARY[0] <= heat <= ORDINARY[1]:
        reason = f"as they do not divide by a temperature of {heat:g}"
    if reason is None:
        vocab = text_config(models[0]).vocab_size
        own = rules[0], judge.spec, coins.seeds(), heat, opening.width, vocab
        return kernel_step(*own), BY_KERNELS
    if wanted == "kernels":
        raise ValueError(f"device_loop: must not be 'kernels' here, {reason}")
    return None, f"device, by torch {reason}"


def _unlike(opening: Opening) -> str | None:
    """Return what makes rounds differ in kind."""
    judge = opening.options.judge
    if opening.drafter is not None and not _plain(opening.drafter):
        return "where a drafter is more than a model"
    if not isinstance(opening.pace, FixedPace):
        return "where adaptive or gate chooses each round"
    if opening.warp.processors:
        return "where logits processors apply"
    if any(schedule is not None for schedule in opening.rules.schedules):
        return "where a schedule chooses policies"
    if judge.drafts != ("chain",):
        return f"where {judge.spec} may walk trees"
    if judge.needs_next_draft_row:
        return f"where {judge.spec} reads one more draft row"
    return None


def _plain(drafter: Drafter) -> bool:
    return isinstance(drafter, ModelDrafter) and not drafter.greedy and drafter.stop is None


def _watched(options: DecodeOptions) -> str | None:
    """Return which options are given that the device loop does not have."""
    given = [name for name in ("record_rows", "on_rows", "on_round") if getattr(options, name)]
    given += ["fast_forward"] * (options.fast_forward is False)
    given += ["stop"] * (options.stop is not None)
    return f"where {', '.join(given)} is used" if given else None


def _unfit(models: dict[str, Any], positions: int) -> str | None:
    for name, model in models.items():
        reason = not_fast(model, positions)
        if reason is not None:
            return f"as to {name}, {reason}"
    return None
