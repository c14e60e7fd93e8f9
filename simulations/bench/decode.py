"""Tokens per second of a model pair: this loop beside Hugging Face's own, lossless and warm.

The library's assisted generation is pinned to the same draft length: a constant schedule,
no confidence threshold. Every prompt is decoded by all jobs before the next one; speeds and
costs of a round are medians over repeats, ratios medians of ratios within a repeat.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.decoding import load_pair

from ..common.decode import Decoded, Harness
from ..common.grid import HF_ASSISTED, HF_PLAIN, PLAIN, Config
from ..common.inputs import load_prompts

# drafted tokens a round, new tokens a text, texts of the batch, prompts
WIDTH, NEW, BATCH, PROMPTS = 4, 96, 8, 8
LOSSLESS, RELAXED, PRICED = "speculative", "cactus:delta=0.1", "band:price=2"


@dataclass
class Line:
    """One row of the table: what is decoded, how, and what each repeat's decodes gave."""

    job: str
    config: Config
    meter: bool = False
    repeats: list[list[Decoded]] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Return tokens per second of each repeat."""
        return [
            sum(one.num_tokens for one in own) / sum(one.seconds for one in own)
            for own in self.repeats
        ]

    @property
    def rounds(self) -> list[float]:
        """Return milliseconds a round of each repeat, none for the library's methods."""
        counted = [[(one.seconds, one.result) for one in own] for own in self.repeats]
        return [
            1e3 * sum(seconds for seconds, _ in own) / sum(r.target_calls for _, r in own if r)
            for own in counted
            if all(result is not None for _, result in own)
        ]


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
    for repeat in range(repeats + 1):  # the first one warms up
        _repeat(harness, found, random.Random(repeat))
    for own in found:
        del own.repeats[0]
    assisted = next(own for own in found if own.config.method == HF_ASSISTED)
    lossless = next(own for own in found if own.config.method == LOSSLESS)
    for own in found:
        yield _row(own, target.name, assisted, lossless)


def _repeat(harness: Harness, found: list[Line], order: random.Random) -> None:
    """Decode every prompt by every line, in an order drawn anew for each prompt."""
    for own in found:
        own.repeats.append([])
    for number in range(len(harness.prompts)):
        for own in order.sample(found, len(found)):
            if number % own.config.batch == 0:
                group = number // own.config.batch
                own.repeats[-1].append(harness.decode(own.config, group, meter=own.meter))


def _row(own: Line, target: str, assisted: Line, lossless: Line) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": target,
        "job": own.job,
        "num_draft_tokens": WIDTH,
        "tokens_per_second": statistics.median(own.speeds),
        "least": min(own.speeds),
        "most": max(own.speeds),
        "times_assisted": _ratio(own.speeds, assisted.speeds),
        "tokens_per_call": "",
        "milliseconds_per_round": "",
        "times_lossless_round": "",
        "outside_forward": "",
        "meter_share": "",
    }
    results = [one.result for done in own.repeats for one in done if one.result is not None]
    if results:
        total = sum(result.seconds.total for result in results)
        outside = sum(result.seconds.verify + result.seconds.other for result in results)
        tokens = sum(result.num_tokens for result in results)
        row |= {
            "tokens_per_call": tokens / sum(result.row_calls for result in results),
            "milliseconds_per_round": statistics.median(own.rounds),
            "times_lossless_round": _ratio(own.rounds, lossless.rounds),
            "outside_forward": outside / total,
            "meter_share": sum(result.seconds.meter for result in results) / total,
        }
    return row


def _ratio(own: list[float], rival: list[float]) -> float:
    """Return the median over repeats of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(own, rival, strict=True))


def line(row: dict[str, Any]) -> str:
    """Return a row as it is printed."""
    said = (
        f"{row['tokens_per_second']:>9.1f} tokens/s  {row['times_assisted']:>5.2f}x assisted  "
        f"{row['job']}"
    )
    if row["tokens_per_call"] == "":
        return said
    calls, outside, meter = row["tokens_per_call"], row["outside_forward"], row["meter_share"]
    return (
        f"{said}  {calls:.2f} a call, {row['milliseconds_per_round']:.2f} ms a round "
        f"({row['times_lossless_round']:.2f}x lossless), outside {outside:.1%}, meter {meter:.1%}"
    )
