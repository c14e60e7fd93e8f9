"""What was aimed at on a GPU, what was measured, and whether that is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..common.grid import PLAIN
from ..throughput.table import LEVELS, read, rising
from .sections import Bench, Message, Row, Tables
from .verify import BAND, LARGE, LOSSLESS

MET, MISSED, UNMEASURED = "met", "not met", "not measured"
# nats a token up to which the band or a block verifier should be ahead of Cactus
MOST_KL = 0.1
TARGET = "8b"
Measure = Callable[[Tables], float | None]


@dataclass(frozen=True)
class Goal:
    """A bound on one number; ``measured`` gives the worst value there is, None if none."""

    name: str
    measured: Measure
    needed: float
    at_least: bool
    unit: str = ""


def rows(bench: Bench) -> Iterator[Message]:
    """Yield goal, needed, measured, unit, verdict; a rehearsal measures nothing."""
    tables = bench.tables if bench.device.type == "cuda" and not bench.tiny else {}
    for goal in GOALS:
        yield goal_row(goal, tables)


def goal_row(goal: Goal, tables: Tables) -> Row:
    value = goal.measured(tables)
    enough = value is not None and (value >= goal.needed if goal.at_least else value <= goal.needed)
    return {
        "goal": goal.name,
        "needed": f"{'≥' if goal.at_least else '≤'} {goal.needed:g} {goal.unit}".rstrip(),
        "measured": value,
        "unit": goal.unit,
        "verdict": UNMEASURED if value is None else MET if enough else MISSED,
    }


def _worst(table: str, column: str, worst: Callable, **where: object) -> Measure:
    """Return what gives the worst value of a column, of the rows where others hold these values."""

    def measured(tables: Tables) -> float | None:
        matching = [row for row in tables.get(table, ())
               if all(row[key] == value for key, value in where.items())]  # fmt: skip
        values = [row[column] for row in matching if row[column] is not None]
        return worst(values) if values else None

    return measured


def _verification(tables: Tables) -> float | None:
    """Return the largest share of a round that a kernel's verification takes."""
    shares = [
        row["verify_ms"] / row["round_ms"]
        for row in tables.get("decode", ())
        if row["target"] == TARGET
        and (row["policy"], row["verifier"]) in ((LOSSLESS, "chain"), ("band", "chain"))
        and row["verify_ms"] is not None
    ]
    return max(shares, default=None)


def _ahead(tables: Tables) -> float | None:
    """Return the least lead over Cactus at equal emitted KL, over levels and batches.

    At a level each family is at its best K, read between the knob values that were run.
    """
    decodes = [row for row in tables.get("decode", ()) if row["target"] == TARGET]
    leads = []
    for batch in sorted({row["batch"] for row in decodes}):
        in_batch = [row for row in decodes if row["batch"] == batch]
        bands, cactus_rows = ([row for row in in_batch if (row["policy"] == "cactus") == cactus]
                        for cactus in (False, True))  # fmt: skip
        bands = [row for row in bands if row["policy"] in ("band", "soft_band")]
        for level in (level for level in LEVELS if level <= MOST_KL):
            fast, slow = _best(bands, level), _best(cactus_rows, level)
            if fast is not None and slow is not None:
                leads.append(fast / slow)
    return min(leads, default=None)


def _best(rows: Sequence[Row], level: float) -> float | None:
    """Return the most tokens per second that a family of policies has at a level of KL."""
    families: dict[tuple[object, ...], list[list[float]]] = {}
    for row in rows:
        kind = row["policy"], row["verifier"], row["num_draft_tokens"]
        point = [row["emitted_kl_per_token"], row["tokens_per_second"]]
        if None not in point:
            families.setdefault(kind, []).append(point)
    curves = [rising(np.array(points)) for points in families.values() if len(points) > 1]
    heights = [read(level, curve) for curve in curves]
    return max((height for height in heights if height is not None), default=None)


STEP = {"verifier": "chain", "vocabulary": LARGE}
GOALS = (
    Goal(
        "lossless kernel at B = 64: share of copy bandwidth, worst K",
        _worst("verify", "share_of_bandwidth", min, policy=LOSSLESS, batch=64, **STEP), 0.7, True,
    ),
    Goal(
        "lossless kernel at B = 1, K = 8",
        _worst("verify", "kernel_us", max, policy=LOSSLESS, batch=1, drafted=8, **STEP),
        60, False, "µs",
    ),
    Goal(
        "lossless: torch path ÷ kernel, worst shape",
        _worst("verify", "torch_over_kernel", min, policy=LOSSLESS, **STEP), 5, True, "×",
    ),
    Goal(
        "band at a price ÷ lossless kernel, worst shape",
        _worst("verify", "over_lossless", max, policy=BAND, **STEP), 1.3, False, "×",
    ),
    Goal(
        "plain decoding at 8b, batch 1: share of its roofline",
        _worst("decode", "share_of_roofline", min, target=TARGET, policy=PLAIN, batch=1), 0.7, True,
    ),
    Goal(
        "lossless at 8b: speed-up ÷ (tokens per call ÷ (Kc + v)), worst K",
        _worst("decode", "share_of_predicted", min, target=TARGET, policy=LOSSLESS,
               verifier="chain"), 0.9, True,
    ),
    Goal(
        f"band or block ÷ Cactus at equal KL ≤ {MOST_KL:g} nats a token, worst level",
        _ahead, 1.0, True, "×",
    ),
    Goal("verification's share of a round at 8b, lossless and band", _verification, 0.03, False),
)  # fmt: skip
