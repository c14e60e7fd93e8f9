"""Whole answers beside lossless ones: how long they are, how fast one is, what they score.

Lossless answers are those of all lossless lines of a batch size, whose law is one. Ratios and
differences are paired by prompt, ``_se`` is the jackknife's over prompts, which are a sample of
others; ``length_ratio_se_given_prompts`` is that of the answers to these. An answer that the limit
cuts off counts as long as the limit, so a length ratio is then nearer to 1 than to the end.
Answers to one prompt are alike: the interval of a score in [0, 1] is Wilson's (95 %) for as many
independent answers as have that jackknife error (Korn and Graubard 1998), prompts where it is 0.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from cactus_theory.answer_bounds import event_bounds
from cactus_theory.base.prompts import Prompt
from cactus_theory.base.significance import WIDE
from cactus_theory.base.specs import Registry
from cactus_theory.lm_eval.tasks import TASKS
from cactus_theory.traces import Estimate
from cactus_theory.traces.estimate import ratio_of_sums, valued

from .grid import BASELINES, Config, Record, Runs, name, total
from .statistics import resamples, spread

LOSSLESS = (*BASELINES, "speculative")
COLUMNS = (
    "method knob verifier num_draft_tokens batch answers mean_length mean_length_se cut "
    "length_ratio length_ratio_se length_ratio_se_given_prompts calls_per_answer "
    "seconds_per_answer seconds_per_answer_low seconds_per_answer_high "
    "speed_ratio answer_speed_ratio emitted_kl_per_token "
    "emitted_kl_per_answer raised_off_head_per_1000 score score_se score_low score_high "
    "score_difference score_difference_se allowed_low allowed_high"
).split()
HEADS = {
    "name": "method", "mean_length": "tokens\n/answer", "mean_length_se": "±", "cut": "cut off",
    "length_ratio": "x lossless", "length_ratio_se": "±", "seconds_per_answer": "s/answer",
    "emitted_kl_per_token": "KL/token", "raised_off_head_per_1000": "raised off\nhead/1,000",
    "score": "score", "score_low": "from", "score_high": "to", "score_difference": "– lossless",
    "score_difference_se": "±",
}  # fmt: skip
Row = dict[str, Any]
SCORES: Registry[FunctionType] = Registry(
    "score", FunctionType, "a function of prompt and completion that returns a number", "--score"
)


Score = Callable[[Prompt, str], float]


def score_of(source: str | None) -> Score | None:
    """Return a score by its name, or the function that ``FILE.py:NAME`` names, its numbers checked.

    None for None.
    """
    if source is None:
        return None
    if (task := TASKS.get(source)) is not None:
        return lambda prompt, text: float(
            task.right(task.checked(prompt.columns, prompt.place), text)
        )
    score, named = SCORES.read(source)
    try:
        inspect.signature(score).bind("prompt", "completion")
    except TypeError:
        own = f"{score.__name__}{inspect.signature(score)}"
        raise TypeError(f"--score: must take a prompt and its completion; got {own}") from None

    def checked(prompt: Prompt, completion: str) -> float:
        try:
            value = float(score(prompt.text, completion))
        except Exception as error:  # the file is not ours
            raise ValueError(f"--score: {named} raised {type(error).__name__}: {error}") from error
        if not np.isfinite(value):
            raise ValueError(f"--score: {named} must return finite numbers; got {value}")
        return value

    return checked


def answer_rows(
    runs: Mapping[Config, Runs], prompts: int, *, timed: bool = True, seed: int = 0
) -> list[Row]:
    """Return a line for every config: COLUMNS, None where nothing was measured.

    Speeds are those of timed repeats (none if not ``timed``), beside those of the fastest lossless
    line of this loop and batch size; ``_low`` and ``_high`` as in tables of speeds. ``allowed`` is
    what the metered KL of an answer lets the mean of a score in [0, 1] become, from the least to
    the most of the lossless score's interval.
    """
    rows = []
    for line, own in runs.items():
        peers = {other: its for other, its in runs.items()
                 if other.batch == line.batch and other.method in LOSSLESS}  # fmt: skip
        ours = [its for other, its in peers.items() if not other.method.startswith("hf_")]
        row: Row = dict.fromkeys(COLUMNS) | line.columns
        lossless = None if line in peers else [*peers.values()]
        row |= _lengths(own, lossless, prompts) | _costs(own)
        if timed:
            row |= _seconds(own, ours, prompts, seed)
        if row["speed_ratio"] and row["length_ratio"]:
            row["answer_speed_ratio"] = row["speed_ratio"] / row["length_ratio"]
        rows.append(row | _scores(own, lossless, prompts, row["emitted_kl_per_answer"]))
    return rows


def _mean(records: Sequence[Record], column: str, prompts: int) -> Estimate:
    """Return the mean over answers; records cover all prompts in order, again and again."""
    values = np.array([value for record in records for value in record[column]], dtype=np.float64)
    passes = values.reshape(-1, prompts)
    return ratio_of_sums(passes.sum(0), np.full(prompts, float(len(passes))), "prompts")


def _relative_error(records: Sequence[Record], column: str, prompts: int) -> float:
    """Return the standard error of the mean over answers to these prompts, over that mean."""
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


def _scores(own: Runs, lossless: Sequence[Runs] | None, prompts: int, nats: float | None) -> Row:
    if "scores" not in own.metered[0]:
        return {}
    mean = _mean(own.metered, "scores", prompts)
    row: Row = valued("score", mean)
    records = [record for its in lossless or () for record in its.metered]
    scores = [score for record in (*records, *own.metered) for score in record["scores"]]
    rates = 0 <= min(scores) and max(scores) <= 1
    if rates:
        row |= dict(zip(("score_low", "score_high"), _rate_interval(mean), strict=True))
    if not lossless:
        return row
    base = _mean(records, "scores", prompts)
    row |= valued("score_difference", mean - base)
    if nats is not None and rates:
        least, most = (event_bounds(end, cap=max(nats, 0.0)) for end in _rate_interval(base))
        row |= {"allowed_low": least.low, "allowed_high": most.high}
    return row


def _rate_interval(rate: Estimate) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a mean in [0, 1] with the error of ``rate`` over prompts."""
    value, square = rate.value, rate.standard_error**2
    count = value * (1 - value) / square if square > 0 else len(rate.left_out)
    center, spread = value + WIDE**2 / (2 * count), WIDE**2 / (4 * count**2)
    half = WIDE * math.sqrt(value * (1 - value) / count + spread)
    low, high = ((center + side * half) / (1 + WIDE**2 / count) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def _largest_error(row: Row) -> float:
    """Return the error of a length over prompts, or over answers to these where it is larger."""
    return max(row["length_ratio_se"] or 0.0, row["length_ratio_se_given_prompts"] or 0.0)


def sentences(rows: Sequence[Row]) -> list[str]:
    """Return in words where answers are longer or shorter than lossless ones, at 95 %."""
    said = []
    for row in rows:
        ratio, error = row["length_ratio"], _largest_error(row)
        if ratio is None or not abs(ratio - 1) > WIDE * error:
            continue
        ends = f"{ratio - WIDE * error:.2f} to {ratio + WIDE * error:.2f}"
        length = f"{ratio:.2f} ({ends}) times the length"
        if row["speed_ratio"]:
            whole = f": {row['answer_speed_ratio']:.2f} times as fast an answer"
            length = f"{row['speed_ratio']:.2f} times the tokens a second, {length}{whole}"
        said.append(f"Batch {row['batch']}, {name(row)}: {length}.")
    if all(row["cut"] == 1 for row in rows):
        said.append("Every answer ran into the limit: nothing is known of their lengths.")
    elif not said:
        said.append("No line's answers differ in length from lossless ones beyond 95 %.")
    return said
