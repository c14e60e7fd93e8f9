"""Two families of policies at equal emitted KL, the same K and batch: which is faster?

Each family is a curve, tokens per second against the logarithm of the emitted KL per token,
known at the knob values that were run. Between them it is read off a monotone cubic; outside them
nothing is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..common.grid import Config, Runs
from ..common.statistics import Curve, Draws, hermite, interval, monotone_curve, resamples

# nats per token at which families are compared
LEVELS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
DEFAULT = ("band:price", "cactus:delta")


def chosen(wanted: Sequence[str] | None, lines: Sequence[Config]) -> tuple[str, str] | None:
    """Return the two families to compare; None if nobody asked and the default are not there.

    Raises
    ------
    ValueError
        A family asked for has fewer than two knob values in the run.
    """
    first, second = wanted or DEFAULT
    sizes = {name: len({line.method for line in lines if line.family == name})
             for name in (first, second)}  # fmt: skip
    short = [name for name, size in sizes.items() if size < 2]
    if short and wanted is None:
        return None
    if short:
        known = ", ".join(sorted({line.family for line in lines if line.width}))
        raise ValueError(
            f"--compare: {short[0]} needs at least two knob values among the policies; "
            f"got {sizes[short[0]]}, families are {known}"
        )
    return first, second


def rows(
    runs: Mapping[Config, Runs], families: tuple[str, str], seed: int = 0
) -> list[dict[str, Any]]:
    """Return one dictionary per level, K and batch that both families reach.

    ``ratio`` is the first family's tokens per second over the second's. Its interval comes
    from resampling timed repeats and metered prompts, the same ones for both families.
    """
    found = []
    for width, batch in sorted({(line.width, line.batch) for line in runs if line.width}):
        members = [
            [own for line, own in runs.items()
             if (line.family, line.width, line.batch) == (name, width, batch)]
            for name in families
        ]  # fmt: skip
        if min(map(len, members)) >= 2:
            place = {"num_draft_tokens": width, "batch": batch}
            found += [place | row for row in _compared(members, families, seed)]
    return found


def nothing(families: tuple[str, str]) -> str:
    """Return why there is no table."""
    levels = ", ".join(f"{level:g}" for level in LEVELS)
    return (
        f"nothing to compare at equal KL: {' and '.join(families)} need two knob values each at "
        f"one K and batch, metered on both sides of one of {levels} nats"
    )


def _compared(
    members: list[list[Runs]], families: tuple[str, str], seed: int
) -> list[dict[str, Any]]:
    generator, one = np.random.default_rng(seed), members[0][0]
    draws = resamples(len(one.timed), generator), resamples(len(one.judged), generator)
    whole = [curves(own)[0] for own in members]
    drawn = list(zip(*(curves(own, *draws) for own in members), strict=True))
    found = []
    for level in LEVELS:
        first, second = (read(level, curve) for curve in whole)
        if first is None or second is None:
            continue
        low, high = _interval(level, drawn)
        found.append(
            {
                "kl": level,
                "first": families[0],
                "second": families[1],
                "tokens_per_second_first": first,
                "tokens_per_second_second": second,
                "ratio": first / second,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return found


def _interval(level: float, drawn: Sequence[tuple[Curve, Curve]]) -> list[float | None]:
    pairs = [(read(level, first), read(level, second)) for first, second in drawn]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return [*interval(ratios)] if ratios else [None, None]


def curves(
    members: Sequence[Runs],
    repeats: Draws | None = None,
    prompts: Draws | None = None,
) -> list[Curve]:
    """Return one curve per draw of timed repeats and metered prompts; without, one of all."""
    points = []
    for own in members:
        cost = np.array([[record["kl"], record["tokens"]] for record in own.judged])
        kl, tokens = np.moveaxis(cost[None] if prompts is None else cost[prompts], -1, 0).sum(-1)
        speeds = own.speeds[None] if repeats is None else own.speeds[repeats]
        points.append(np.stack([kl / tokens, np.median(speeds, axis=-1)], -1))
    return [rising(own) for own in np.stack(points, 1)]


def rising(points: Float[np.ndarray, "members 2"]) -> Curve:
    """Return the curve of tokens per second over ln KL through the points that cost something."""
    kl, speed = points[points[:, 0] > 0].T
    return monotone_curve(np.log(kl), speed)


def read(level: float, curve: Curve) -> float | None:
    """Return the curve's height at KL ``level``, None outside its points."""
    return hermite(float(np.log(level)), *curve)
