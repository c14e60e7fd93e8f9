"""Whether the device loop runs a decode, and why it cannot."""

from typing import Any

from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.device.capture import captures
from cactus_theory.decoding.device.loop import DeviceDecode, capacity
from cactus_theory.decoding.drafters import Drafter
from cactus_theory.decoding.drafters.model import ModelDrafter
from cactus_theory.decoding.models.fast import obstacle as not_fast
from cactus_theory.decoding.pace import FixedPace, Pace
from cactus_theory.verify.contract import Verifier


def on_device(
    wanted: bool | None,
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

    ``wanted`` is True, False or None (on a GPU, if it fits). ``watched`` are arguments, by name,
    that the device loop does not have; any that is given keeps it from running.

    Raises
    ------
    ValueError
        It is wanted and cannot run.
    """
    if wanted is False or (wanted is None and not captures(texts.device)):
        return None, "host"
    draft = drafter.model if isinstance(drafter, ModelDrafter) else None
    reason = (
        _unlike(drafter, rules, warp, pace, verifier)
        or _watched(watched | {"stop": texts.stop})
        or _unfit({"target_model": target_model, "draft_model": draft}, capacity(texts, width))
    )
    if reason is None:
        decode = DeviceDecode(
            target_model, draft, texts, rules, warp.temperature, coins, width, verifier, meter
        )
        return decode, "device"
    if wanted:
        raise ValueError(f"device_loop: must be None or False here, {reason}; got True")
    return None, f"host, {reason}"


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
