"""Tokens per second with drafts that stop early, against the best fixed number of drafted tokens.

Every prompt is decoded by all lines before the next one, in an order drawn anew. Speeds are
medians over repeats, comparisons medians of ratios within a repeat; intervals are percentiles
over resampled repeats. The expected acceptances of a stop are fitted, under the line's policy, on
prompts of their own. The best fixed K is picked on the same repeats that it is compared on, and
so is whichever stop looks best: differences of a percent are luck.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.decoding import DraftStop, ModelDrafter

from ..common.decode import Harness
from ..common.grid import Config, Grid, Job, Record, Runs, total
from ..common.statistics import resamples, spread
from .decode import harness_of

POLICIES = ("speculative", "band:price=1")
# K without a stop, K with one, thresholds of the stop
FIXED, STOPPED, THRESHOLDS = (1, 2, 3, 4, 6, 8, 12), (4, 8, 12), (0.1, 0.2, 0.3, 0.4, 0.5)
# new tokens a text, prompts; as many others for the fit
NEW, PROMPTS = 48, 8


@dataclass(frozen=True)
class Line(Config):
    stop: DraftStop | None = None

    @property
    def threshold(self) -> float | str:
        """Return the stop's threshold, nothing without one."""
        return "" if self.stop is None else self.stop.threshold

    @property
    def key(self) -> str:
        """Return the name under which results are kept."""
        return f"{super().key}|stop={self.threshold}"


def measure(target: Path, draft: Path, prompts: Path, repeats: int) -> Iterator[dict[str, Any]]:
    whole = harness_of(target, draft, prompts, 2 * PROMPTS, NEW)
    harness = replace(whole, prompts=whole.prompts[:PROMPTS])
    others = replace(harness, prompts=whole.prompts[PROMPTS:] or whole.prompts)
    table = [line for policy in POLICIES for line in lines(policy, fitted(others, policy))]

    def decoded(job: Job) -> Record:
        drafter = ModelDrafter(harness.pair.draft, stop=job.config.stop)
        stopping = replace(harness, pair=replace(harness.pair, draft=drafter))
        decode = stopping.decode(job.config, job.group, repeat=job.repeat)
        assert decode.result is not None
        return decode.record | {"draft_calls": decode.result.draft_calls}

    grid = Grid(table, len(harness.prompts), repeats)  # the metered repeat warms up
    runs = grid.runs(grid.fill(decoded))
    for policy in POLICIES:
        yield from rows({line: runs[line] for line in table if line.method == policy}, target.name)


def fitted(harness: Harness, policy: str) -> DraftStop:
    """Return a stop whose acceptances are those of this policy on the prompts of ``harness``."""
    config = Config(policy, max(STOPPED), len(harness.prompts))
    result = harness.decode(config, 0, record_rows=True).result
    assert result is not None and result.rows is not None
    return DraftStop.from_rows(result.rows, policy)


def lines(policy: str, stop: DraftStop) -> list[Line]:
    return [Line(policy, width, 1) for width in FIXED] + [
        Line(policy, width, 1, stop=replace(stop, threshold=threshold))
        for width in STOPPED
        for threshold in THRESHOLDS
    ]


def rows(by_line: dict[Line, Runs], target: str) -> Iterator[dict[str, Any]]:
    fixed = [line for line in by_line if line.stop is None]
    best = max(fixed, key=lambda line: np.median(by_line[line].speeds))
    draws = resamples(len(by_line[best].timed))
    for line, runs in by_line.items():
        tokens, calls, steps = (
            total(runs.clocked, name) for name in ("tokens", "row_calls", "draft_calls")
        )
        yield {
            "target": target,
            "policy": line.method,
            "num_draft_tokens": line.width,
            "threshold": line.threshold,
            "tokens_per_call": tokens / calls,
            "draft_steps_per_call": steps / calls,
            "tokens_per_draft_step": tokens / steps,
            **spread("tokens_per_second", runs.speeds, draws),
            "best_fixed": best.width,
            **spread("times_best_fixed", runs.speeds / by_line[best].speeds, draws),
        }


def line(row: dict[str, Any]) -> str:
    stop = "no stop" if row["threshold"] == "" else f"stop {row['threshold']:.1f}"
    ratio = "–".join(f"{row[f'times_best_fixed_{end}']:.3f}" for end in ("low", "high"))
    return (
        f"{row['policy']:<13} K={row['num_draft_tokens']:<3} {stop:<9} "
        f"{row['tokens_per_call']:>5.2f} a call {row['tokens_per_draft_step']:>5.2f} a draft step "
        f"{row['tokens_per_second']:>7.1f} tokens/s  {row['times_best_fixed']:.3f} ({ratio}) x "
        f"fixed K={row['best_fixed']}"
    )
