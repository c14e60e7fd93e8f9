"""Tokens per second of a model pair: this loop beside Hugging Face's own, lossless and warm.

The library's assisted generation is pinned to the same draft length: a constant schedule,
no confidence threshold. Jobs are interleaved over repeats; a row's speed is the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.decoding import GenerationResult, load_pair

from ..common.decode import Harness
from ..common.grid import HF_ASSISTED, HF_PLAIN, PLAIN, Config
from ..common.inputs import load_prompts

WIDTH, NEW, BATCH, PROMPTS = 4, 96, 8, 8
LOSSLESS, RELAXED, PRICED = "speculative", "cactus:delta=0.1", "band:price=2"


@dataclass
class Line:
    """One row of the table: what is decoded, how, and what every timed repeat gave."""

    job: str
    config: Config
    meter: bool = False
    speeds: list[float] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Return the median of the repeats, tokens per second."""
        return statistics.median(self.speeds)


def lines() -> list[Line]:
    """Return the jobs; add one and it is in the table."""
    return [
        Line("Hugging Face generate", Config(HF_PLAIN, 0, 1)),
        Line("Hugging Face assisted generation", Config(HF_ASSISTED, WIDTH, 1)),
        Line("plain", Config(PLAIN, 0, 1)),
        Line("lossless", Config(LOSSLESS, WIDTH, 1)),
        Line(f"{RELAXED}, meter off", Config(RELAXED, WIDTH, 1)),
        Line(f"{RELAXED}, meter on", Config(RELAXED, WIDTH, 1), meter=True),
        Line(f"{PRICED}, meter off", Config(PRICED, WIDTH, 1)),
        Line(f"lossless, batch of {BATCH}", Config(LOSSLESS, WIDTH, BATCH)),
    ]


def measure(target: Path, draft: Path, prompts: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per job."""
    pair = load_pair(target, draft)
    texts = load_prompts(prompts, target)[:PROMPTS]
    longest = min(model.config.max_position_embeddings for model in (pair.target, pair.draft))
    room = min(NEW, longest - max(map(len, texts)))
    harness = Harness(pair, texts, room, seed=0, ends=False)
    found = lines()
    for repeat in range(repeats + 1):
        for own in found:
            _decode(harness, own, keep=repeat > 0)  # the first run warms up
    assisted = next(own.speed for own in found if own.config.method == HF_ASSISTED)
    for own in found:
        yield _row(own, target.name, assisted)


def _decode(harness: Harness, own: Line, keep: bool) -> None:
    groups = math.ceil(len(harness.prompts) / own.config.batch)
    done = [harness.decode(own.config, group, meter=own.meter) for group in range(groups)]
    if keep:
        seconds = sum(one.seconds for one in done)
        own.speeds.append(sum(one.num_tokens for one in done) / seconds)
        own.results += [one.result for one in done if one.result is not None]


def _row(own: Line, target: str, assisted: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": target,
        "job": own.job,
        "num_draft_tokens": WIDTH,
        "tokens_per_second": own.speed,
        "least": min(own.speeds),
        "most": max(own.speeds),
        "times_assisted": own.speed / assisted,
        "tokens_per_call": "",
        "milliseconds_per_round": "",
        "outside_forward": "",
        "meter_share": "",
    }
    if own.results:
        total = sum(result.seconds.total for result in own.results)
        outside = sum(result.seconds.verify + result.seconds.other for result in own.results)
        tokens = sum(result.num_tokens for result in own.results)
        row |= {
            "tokens_per_call": tokens / sum(result.row_calls for result in own.results),
            "milliseconds_per_round": 1e3 * total / sum(r.target_calls for r in own.results),
            "outside_forward": outside / total,
            "meter_share": sum(result.seconds.meter for result in own.results) / total,
        }
    return row


def line(row: dict[str, Any]) -> str:
    """Return a row as it is printed."""
    said = (
        f"{row['tokens_per_second']:>9.1f} tokens/s  {row['times_assisted']:>5.2f}x assisted  "
        f"{row['job']}"
    )
    if row["tokens_per_call"] == "":
        return said
    return (
        f"{said}  {row['tokens_per_call']:.2f} a call, {row['milliseconds_per_round']:.2f} ms a "
        f"round, outside {row['outside_forward']:.1%}, meter {row['meter_share']:.1%}"
    )
