"""Measure tokens per second of a model pair: our loop beside Hugging Face's generation.

The library's assisted generation has the same fixed draft length: a constant schedule and no
confidence threshold. Every prompt is decoded by all jobs before the next prompt. Speeds and times
of a round are medians over repeats, ratios are medians of ratios within a repeat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base.prompts import Prompt
from cactus_theory.decoding import Pair

from ..common.decode import Harness
from ..common.grid import HF_ASSISTED, HF_PLAIN, PLAIN, Config, Grid, Job, Record, Runs, total

# drafted tokens per round, new tokens per text, texts per batch, prompts
WIDTH, NEW, BATCH, PROMPTS = 4, 96, 8, 8
HEADS = {
    "job": "job", "tokens_per_second": "tokens/s", "times_assisted": "× assisted",
    "tokens_per_call": "tokens\n/call", "milliseconds_per_round": "ms\n/round",
    "times_lossless_round": "× lossless\nround", "outside_forward": "outside\nforwards",
    "meter_share": "meter",
}  # fmt: skip
LOSSLESS, RELAXED, PRICED = "speculative", "cactus:delta=0.1", "band:price=2"


Opened = tuple[Pair, list[Prompt], list[list[int]]]


@dataclass(frozen=True)
class Line(Config):
    """A row of the table: a config, its name, and whether the meter is on."""

    job: str = ""
    meter: bool = False

    @property
    def key(self) -> str:
        return self.job


def lines() -> list[Line]:
    return [
        Line(HF_PLAIN, 0, job="Hugging Face generate"),
        Line(HF_ASSISTED, WIDTH, job="Hugging Face assisted generation"),
        Line(PLAIN, 0, job="plain"),
        Line(LOSSLESS, WIDTH, job="lossless"),
        Line(RELAXED, WIDTH, job=f"{RELAXED}, meter off"),
        Line(RELAXED, WIDTH, job=f"{RELAXED}, meter on", meter=True),
        Line(PRICED, WIDTH, job=f"{PRICED}, meter off"),
        Line(LOSSLESS, WIDTH, batch=BATCH, job=f"lossless, batch of {BATCH}"),
    ]


def harness_of(pair: Pair, ids: Sequence[list[int]]) -> Harness:
    texts = ids[:PROMPTS]
    longest = min(model.config.max_position_embeddings for model in (pair.target, pair.draft))
    return Harness(pair, texts, min(NEW, longest - max(map(len, texts))), seed=0, ends=False)


def measure(repeats: int, opened: Opened, target: str) -> Iterator[dict[str, Any]]:
    """Yield a row per job: speed, time of a round, and ratios to assisted generation."""
    harness = harness_of(opened[0], opened[2])

    def decoded(job: Job) -> Record:
        return harness.decode(job.config, job.group, meter=job.config.meter).record

    grid = Grid(lines(), len(harness.prompts), repeats)  # the metered repeat warms up
    by_line = grid.runs(grid.fill(decoded))
    assisted = next(runs for line, runs in by_line.items() if line.policy == HF_ASSISTED)
    lossless = next(runs for line, runs in by_line.items() if line.policy == LOSSLESS)
    for line, runs in by_line.items():
        yield _row(line, runs, target, assisted, lossless)


def _row(line: Line, runs: Runs, target: str, assisted: Runs, lossless: Runs) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": target,
        "job": line.job,
        "num_draft_tokens": WIDTH,
        "tokens_per_second": float(np.median(runs.speeds)),
        "least": float(runs.speeds.min()),
        "most": float(runs.speeds.max()),
        "times_assisted": float(np.median(runs.speeds / assisted.speeds)),
    }
    row |= {name: "" for name in HEADS if name not in row}  # columns that only rounds fill
    if "target_calls" in runs.metered[0]:
        rounds, rival = (each.per_repeat("seconds", "target_calls") for each in (runs, lossless))
        row |= {
            "tokens_per_call": runs.ratio("tokens", "row_calls"),
            "milliseconds_per_round": 1e3 * float(np.median(rounds)),
            "times_lossless_round": float(np.median(rounds / rival)),
            "outside_forward": runs.share([2, 3]),
            "meter_share": total(runs.clocked, "meter") / total(runs.clocked, "seconds"),
        }
    return row
