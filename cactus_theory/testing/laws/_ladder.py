"""Other values of a policy's knob: fixed ones, and drawn ones between them."""

import math
import random

from cactus_theory.policies import Policy, policy
from cactus_theory.policies import _knobs as knobs

# values at which a registered policy's knob is tried; those outside its range are left out
KNOB_VALUES = (0.0, 0.1, 0.3, 0.7, 1.0, 3.0, float("inf"))
WHOLE_VALUES = (0, 1, 2, 3, 5, 8, 20)
# the same for a knob of a plain function, in multiples of its own value
FACTORS = (0.5, 1.0, 2.0)
# beyond the last finite value, drawn ones reach this many times as far
BEYOND = 4.0
# drawn values in each gap, one in each half of it
BETWEEN = 2


def at_knob(rule: Policy, value: float) -> Policy | None:
    """Return the rule with its knob at ``value``, None outside the knob's range."""
    if rule.knob is None:
        return None
    try:
        return policy(rule, **{rule.knob: value})
    except (TypeError, ValueError):
        return None


def knob_ladder(rule: Policy, between: int = 0, seed: int = 0) -> list[tuple[float, Policy]]:
    """Return (value, rule) at rising values of the knob, its own among them.

    A registered policy raises outside its knob's range. A plain function does not: it is tried
    at ½, 1 and 2 times its own value, at its lossless value and at the ends of ``knob_range``.
    With ``between``, so many values between each two neighbours are added, one drawn from each
    part of the gap.
    """
    if rule.knob is None:
        return []
    own = knobs.of(rule).get(rule.knob)
    value = own.default if hasattr(rule, "source") and own else getattr(rule, rule.knob, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    whole = isinstance(value, int) and (value > 1 or (own is not None and own.kind is int))
    fixed = _fixed(rule, value, whole)
    fixed = (
        {float(round(x)) for x in fixed if math.isfinite(x)} if whole else set(map(float, fixed))
    )
    rungs = _made(rule, fixed | {float(value)})
    if between and rungs:
        drawn = _drawn([rung for rung, _ in rungs], between, seed, whole)
        rungs = sorted(rungs + _made(rule, drawn), key=lambda rung: rung[0])
    return rungs


def other_knobs(rule: Policy, seed: int = 0) -> list[tuple[float, Policy]]:
    """Return (value, rule) drawn inside every gap of the ladder, for policies that allow it.

    A plain function is tried at other values if it declares something about its knob:
    ``direction``, ``strict`` (the value at which it is lossless) or ``knob_range``.
    """
    source = getattr(rule, "source", None)
    said = rule.declares
    if source is not None and not (said.direction or said.strict is not None or source.knob_range):
        return []
    fixed = {value for value, _ in knob_ladder(rule)}
    return [rung for rung in knob_ladder(rule, BETWEEN, seed) if rung[0] not in fixed]


def _made(rule: Policy, values: set[float]) -> list[tuple[float, Policy]]:
    made = ((value, at_knob(rule, value)) for value in sorted(values))
    return [(value, found) for value, found in made if found is not None]


def _fixed(rule: Policy, own: float, whole: bool) -> set[float]:
    source = getattr(rule, "source", None)
    if source is None:
        return set(WHOLE_VALUES if whole else KNOB_VALUES)
    low, high = source.knob_range or (-math.inf, math.inf)
    values = {own * factor for factor in FACTORS} | set(source.knob_range or ())
    lossless = rule.declares.strict
    values |= set() if lossless is None else {lossless}
    return {value for value in values if low <= value <= high}


def _drawn(rungs: list[float], between: int, seed: int, whole: bool) -> set[float]:
    """Return values inside every gap of ``rungs``, which rise."""
    draw = random.Random(seed)
    found = set()
    for low, high in zip(rungs, rungs[1:], strict=False):
        if math.isinf(low):
            continue
        top = high if math.isfinite(high) else max(BEYOND * low, low + BEYOND)
        step = (top - low) / between
        inside = {low + step * (part + draw.random()) for part in range(between)}
        found |= {float(round(x)) for x in inside} if whole else inside
    return found - set(rungs)
