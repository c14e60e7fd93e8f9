"""Compare whole answers with lossless answers: lengths and seconds.

Lossless answers are pooled from all lossless lines of a batch size, which have the same law. Ratios
and differences are paired by prompt. ``_se`` is the jackknife's standard error over prompts, for
which the prompts count as a sample; ``length_ratio_se_given_prompts`` is the error over repeated
answers to these same prompts. An answer that is cut off counts with the limit as its length, which
moves a length ratio towards 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cactus_theory.base.significance import items_needed
from cactus_theory.traces import Estimate
from cactus_theory.traces.estimate import ratio_of_sums, valued

from .grid import BASELINES, Config, Record, Runs, total
from .statistics import resamples, spread

LOSSLESS = (*BASELINES, "speculative")
COLUMNS = (
    "method knob verifier num_draft_tokens batch answers mean_length mean_length_se cut "
    "length_ratio length_ratio_se prompts_needed length_ratio_se_given_prompts calls_per_answer "
    "seconds_per_answer seconds_per_answer_low seconds_per_answer_high "
    "speed_ratio answer_speed_ratio emitted_kl_per_token "
    "emitted_kl_per_answer raised_off_head_per_1000"
).split()
HEADS = {
    "name": "method", "mean_length": "tokens\n/answer", "mean_length_se": "±", "cut": "cut off",
    "length_ratio": "x lossless", "length_ratio_se": "±",
    "prompts_needed": "prompts\nneeded", "seconds_per_answer": "s/answer",
    "emitted_kl_per_token": "KL/token", "raised_off_head_per_1000": "raised off\nhead/1,000",
}  # fmt: skip
Row = dict[str, Any]


def answer_rows(
    runs: Mapping[Config, Runs], prompts: int, *, timed: bool = True, seed: int = 0
) -> list[Row]:
    """Return a row with COLUMNS for every config; a cell is None if nothing was measured.

    Speeds come from the timed repeats (none without ``timed``) and are compared with this package's
    fastest lossless line of the same batch size. Intervals are as in tables of speeds.
    """
    rows = []
    for line, own in runs.items():
        peers = {other: its for other, its in runs.items()
                 if other.batch == line.batch and other.policy in LOSSLESS}  # fmt: skip
        ours = [its for other, its in peers.items() if not other.policy.startswith("hf_")]
        row: Row = dict.fromkeys(COLUMNS) | line.columns
        lossless = None if line in peers else [*peers.values()]
        row |= _lengths(own, lossless, prompts) | _costs(own)
        if timed:
            row |= _seconds(own, ours, prompts, seed)
        if row["speed_ratio"] and row["length_ratio"]:
            row["answer_speed_ratio"] = row["speed_ratio"] / row["length_ratio"]
        rows.append(row)
    return rows


def _mean(records: Sequence[Record], column: str, prompts: int) -> Estimate:
    values = np.array([value for record in records for value in record[column]], dtype=np.float64)
    passes = values.reshape(-1, prompts)
    return ratio_of_sums(passes.sum(0), np.full(prompts, float(len(passes))), "prompts")


def _relative_error(records: Sequence[Record], column: str, prompts: int) -> float:
    """Return the relative standard error of the mean over repeated answers to these prompts."""
    values = np.array([record[column] for record in records], dtype=np.float64)
    passes = values.reshape(-1, prompts)
    return float(np.sqrt(passes.var(0, ddof=1).sum() / len(passes)) / passes.mean(0).sum())


def _lengths(own: Runs, lossless: Sequence[Runs] | None, prompts: int) -> Row:
    length = _mean(own.all, "lengths", prompts)
    cut = 1 - _mean(own.all, "ended", prompts).value
    row: Row = {"answers": sum(len(record["lengths"]) for record in own.all), "cut": cut}
    row |= valued("mean_length", length)
    if "row_calls" in own.all[0]:
        row["calls_per_answer"] = total(own.all, "row_calls") / row["answers"]
    if lossless and cut < 1:
        base = [record for its in lossless for record in its.all]
        ratio = length / _mean(base, "lengths", prompts)
        row |= valued("length_ratio", ratio)
        row["prompts_needed"] = items_needed(ratio.value - 1, ratio.standard_error, prompts)
        if row["answers"] > prompts:
            errors = [_relative_error(records, "lengths", prompts) for records in (own.all, base)]
            row["length_ratio_se_given_prompts"] = ratio.value * math.hypot(*errors)
    return row


def _costs(own: Runs) -> Row:
    if "kl" not in own.metered[0]:
        return {}
    answers = sum(len(record["lengths"]) for record in own.metered)
    return {
        "emitted_kl_per_token": own.ratio("kl", "tokens"),
        "emitted_kl_per_answer": own.total("kl") / answers,
        "raised_off_head_per_1000": 1000 * own.ratio("raised", "tokens"),
    }


def _seconds(own: Runs, lossless: Sequence[Runs], prompts: int, seed: int) -> Row:
    groups = len(own.timed[0])
    seconds = np.array([[record["seconds"] for record in records] for records in own.timed])
    drawn = seconds[:, resamples(groups, seed)].mean(-1).T * groups / prompts
    row: Row = spread("seconds_per_answer", seconds.sum(-1) / prompts, drawn)
    if lossless and own not in lossless:
        rival = max(lossless, key=lambda its: float(np.median(its.speeds)))
        row["speed_ratio"] = float(np.median(own.speeds / rival.speeds))
    return row
