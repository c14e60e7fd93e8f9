"""Tokens per second with drafts that stop early, against the best fixed number of drafted tokens.

Every prompt is decoded by all lines before the next one, in an order drawn anew. Speeds are
medians over repeats, comparisons medians of ratios within a repeat; intervals are percentiles
over resampled repeats. The expected acceptances of a stop are fitted, under the line's policy, on
prompts of their own. The best fixed K is picked on the same repeats that it is compared on, and
so is whichever stop looks best: differences of a percent are luck.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.decoding import DraftStop, ModelDrafter, load_pair

from ..common.decode import Decoded, Harness
from ..common.grid import Config
from ..common.inputs import load_prompts
from ..common.progress import Progress
from ..throughput.table import INTERVAL, resamples

POLICIES = ("speculative", "band:price=1")
# K without a stop, K with one, thresholds of the stop
FIXED, STOPPED, THRESHOLDS = (1, 2, 3, 4, 6, 8, 12), (4, 8, 12), (0.1, 0.2, 0.3, 0.4, 0.5)
# new tokens a text, prompts; as many others for the fit
NEW, PROMPTS = 48, 8


@dataclass
class Line:
    """One row of the table, and what each repeat's decodes gave."""

    config: Config
    stop: DraftStop | None
    repeats: list[list[Decoded]] = field(default_factory=list)

    @property
    def speeds(self) -> np.ndarray:
        """Return tokens per second of each repeat."""
        return np.array(
            [sum(d.num_tokens for d in own) / sum(d.seconds for d in own) for own in self.repeats]
        )


def measure(target: Path, draft: Path, prompts: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per line."""
    pair = load_pair(target, draft)
    texts = load_prompts(prompts, target)[: 2 * PROMPTS]
    longest = min(model.config.max_position_embeddings for model in (pair.target, pair.draft))
    room = min(NEW, longest - max(map(len, texts)))
    harness = Harness(pair, texts[:PROMPTS], room, seed=0, ends=False)
    others = replace(harness, prompts=texts[PROMPTS:] or texts)
    found = [line for policy in POLICIES for line in lines(policy, fitted(others, policy))]
    with Progress("decoding", repeats + 1) as progress:
        for repeat in range(repeats + 1):  # the first one warms up
            _repeat(harness, found, repeat)
            progress.advance()
    for own in found:
        del own.repeats[0]
    for policy in POLICIES:
        yield from rows([own for own in found if own.config.method == policy], target.name)


def fitted(harness: Harness, policy: str) -> DraftStop:
    """Return a stop whose acceptances are those of this policy on the prompts of ``harness``."""
    config = Config(policy, max(STOPPED), len(harness.prompts))
    result = harness.decode(config, 0, record_rows=True).result
    assert result is not None and result.rows is not None
    return DraftStop.from_rows(result.rows, policy)


def lines(policy: str, stop: DraftStop) -> list[Line]:
    """Return the lines of one policy."""
    return [Line(Config(policy, width, 1), None) for width in FIXED] + [
        Line(Config(policy, width, 1), replace(stop, threshold=threshold))
        for width in STOPPED
        for threshold in THRESHOLDS
    ]


def _repeat(harness: Harness, found: list[Line], repeat: int) -> None:
    order = random.Random(repeat)
    for own in found:
        own.repeats.append([])
    for number in range(len(harness.prompts)):
        for own in order.sample(found, len(found)):
            drafter = ModelDrafter(harness.pair.draft, stop=own.stop)
            drafted = replace(harness, pair=replace(harness.pair, draft=drafter))
            own.repeats[-1].append(drafted.decode(own.config, number, again=repeat))


def rows(found: list[Line], target: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one policy."""
    best = max((own for own in found if own.stop is None), key=lambda own: np.median(own.speeds))
    draws = resamples(len(best.repeats), np.random.default_rng(0))
    for own in found:
        results = [one.result for done in own.repeats for one in done if one.result is not None]
        tokens, calls, steps = (
            sum(getattr(result, name) for result in results)
            for name in ("num_tokens", "row_calls", "draft_calls")
        )
        yield {
            "target": target,
            "policy": own.config.method,
            "num_draft_tokens": own.config.width,
            "threshold": "" if own.stop is None else own.stop.threshold,
            "tokens_per_call": tokens / calls,
            "draft_steps_per_call": steps / calls,
            "tokens_per_draft_step": tokens / steps,
            **_spread("tokens_per_second", own.speeds, draws),
            "best_fixed": best.config.width,
            **_spread("times_best_fixed", own.speeds / best.speeds, draws),
        }


def _spread(name: str, values: np.ndarray, draws: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(np.median(values[draws], axis=1), INTERVAL).tolist()
    return {name: float(np.median(values)), f"{name}_low": low, f"{name}_high": high}


def line(row: dict[str, Any]) -> str:
    """Return a row as it is printed."""
    stop = "no stop" if row["threshold"] == "" else f"stop {row['threshold']:.1f}"
    ratio = "–".join(f"{row[f'times_best_fixed_{end}']:.3f}" for end in ("low", "high"))
    return (
        f"{row['policy']:<13} K={row['num_draft_tokens']:<3} {stop:<9} "
        f"{row['tokens_per_call']:>5.2f} a call {row['tokens_per_draft_step']:>5.2f} a draft step "
        f"{row['tokens_per_second']:>7.1f} tokens/s  {row['times_best_fixed']:.3f} ({ratio}) x "
        f"fixed K={row['best_fixed']}"
    )
