"""Whether the device loop runs a decode, what verifies in it, and why it cannot."""

from typing import Any

from cactus_theory._scores import ORDINARY
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.device.capture import captures
from cactus_theory.decoding.device.fused import kernel_step, obstacle
from cactus_theory.decoding.device.loop import DeviceDecode, capacity
from cactus_theory.decoding.device.verify import VerifyStep
from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.models.fast import obstacle as not_fast
from cactus_theory.decoding.pace import FixedPace, Pace
from cactus_theory.verify.contract import Verifier

# who verifies, where it is said
STEPS = ("torch", "kernels")
BY_KERNELS = "device, by kernels"


def on_device(
    wanted: bool | str | None,
    target_model: Any,
    drafter: Drafter | None,
    texts: Texts,
    rules: Rules,
    warp: Warp,
    coins: Coins,
    pace: Pace,
    width: int,
    verifier: Verifier,
    meter: Any = None,
    **watched: Any,
) -> tuple[DeviceDecode | None, str]:
    """Return the device's decode if it is to run, and what a result says of its loop.

    ``wanted`` is True, False, None (on a GPU, if it fits) or who verifies. ``watched`` are
    arguments, by name, that the device loop does not have; any that is given keeps it from
    running.

    Raises
    ------
    ValueError
        It is wanted, or the kernels are, and cannot run; ``wanted`` is something else.
    """
    _check(wanted)
    if wanted is False or (wanted is None and not captures(texts.device)):
        return None, "host"
    draft = drafter.model if isinstance(drafter, ModelDrafter) else None
    reason = (
        _unlike(drafter, rules, warp, pace, verifier)
        or _watched(watched | {"stop": texts.stop})
        or _unfit({"target_model": target_model, "draft_model": draft}, capacity(texts, width))
    )
    if reason is None:
        models = [model for model in (target_model, draft) if model is not None]
        step, loop = _step(wanted, models, rules, warp.temperature, coins, width, verifier)
        common = texts, rules, warp.temperature, coins, width, verifier, meter
        return DeviceDecode(target_model, draft, *common, step), loop
    if wanted:
        raise ValueError(f"device_loop: must be None or False here, {reason}; got {wanted!r}")
    return None, f"host, {reason}"


def _check(wanted: bool | str | None) -> None:
    if not (wanted is None or isinstance(wanted, bool) or wanted in STEPS):
        allowed = ", ".join(map(repr, (True, False, None, *STEPS)))
        raise ValueError(f"device_loop: must be one of {allowed}; got {wanted!r}")


def _step(
    wanted: bool | str | None,
    models: list[Any],
    rules: Rules,
    temperature: float,
    coins: Coins,
    width: int,
    verifier: Verifier,
) -> tuple[VerifyStep | None, str]:
    """Return the kernels' step where it is to verify, and what a result says of the loop."""
    if wanted == "torch" or (wanted != "kernels" and not captures(coins.device)):
        return None, "device"
    reason = obstacle(rules.rules, verifier, models, coins.device)
    if temperature and not ORDINARY[0] <= temperature <= ORDINARY[1]:
        reason = f"as they do not divide by a temperature of {temperature:g}"
    if reason is None:
        vocab = text_config(models[0]).vocab_size
        own = rules.rules[0], verifier.spec, coins.seeds(), temperature, width, vocab
        return kernel_step(*own), BY_KERNELS
    if wanted == "kernels":
        raise ValueError(f"device_loop: must not be 'kernels' here, {reason}")
    return None, f"device, by torch {reason}"


def _unlike(
    drafter: Drafter | None, rules: Rules, warp: Warp, pace: Pace, verifier: Verifier
) -> str | None:
    """Return what makes rounds differ in kind."""
    if drafter is not None and not _plain(drafter):
        return "where a drafter is more than a model"
    if not isinstance(pace, FixedPace):
        return "where adaptive or gate chooses each round"
    if warp.processors:
        return "where logits processors apply"
    if any(schedule is not None for schedule in rules.schedules):
        return "where a schedule chooses policies"
    if verifier.needs_next_draft_row:
        return f"where {verifier.spec} reads one more draft row"
    return None


def _plain(drafter: Drafter) -> bool:
    return isinstance(drafter, ModelDrafter) and not drafter.greedy and drafter.stop is None


def _watched(watched: dict[str, Any]) -> str | None:
    given = [name for name, value in watched.items() if value]
    return f"where {', '.join(given)} is used" if given else None


def _unfit(models: dict[str, Any], positions: int) -> str | None:
    for name, model in models.items():
        reason = None if model is None else not_fast(model, positions)
        if reason is not None:
            return f"as to {name}, {reason}"
    return None
