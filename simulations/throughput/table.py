"""From finished decodes to one line per config."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ..common.grid import BASELINES, HF_ASSISTED, HF_PLAIN, PLAIN, Config, Job, label

COLUMNS = (
    "method knob verifier num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max tokens_per_second_low tokens_per_second_high speedup_over_plain "
    "speedup_over_plain_low speedup_over_plain_high speedup_over_hf_plain "
    "speedup_over_hf_assisted accepted_per_call tokens_per_call target_calls tokens "
    "outside_forwards emitted_kl_per_token largest_row_kl target_nats_per_token parses "
    "prompts_judged"
).split()
RESAMPLES = 1000
INTERVAL = (5, 95)
Records = list[dict[str, Any]]
PerRepeat = Float[np.ndarray, "repeats"]
Draws = Int[np.ndarray, "draws count"]


@dataclass(frozen=True)
class Runs:
    """The records of one config: of metered repeats, and of timed ones (the same if none)."""

    judged: Records
    timed: list[Records]

    @property
    def speeds(self) -> PerRepeat:
        """Return tokens per second of every timed repeat."""
        return np.array([_total(own, "tokens") / _total(own, "seconds") for own in self.timed])


def collect(
    lines: Sequence[Config],
    groups: Mapping[int, int],
    repeats: int,
    results: Mapping[str, Any],
    metered: int = 1,
) -> dict[Config, Runs]:
    """Return every config's records.

    Parameters
    ----------
    lines : the configs.
    groups : batch size → how many groups the prompts make.
    repeats : timed repeats, after ``metered`` ones.
    results : job key → record, as :func:`simulations.throughput.record.record` gives them.
    """
    found = {}
    for line in lines:
        every = [
            [results[Job(line, repeat, group).key] for group in range(groups[line.batch])]
            for repeat in range(metered + repeats)
        ]
        judged = [record for own in every[:metered] for record in own]
        found[line] = Runs(judged, every[metered:] or every)
    return found


def resamples(count: int, generator: np.random.Generator) -> Draws:
    """Return which of ``count`` things each of RESAMPLES draws, with replacement, consists of."""
    return generator.integers(count, size=(RESAMPLES, count))


def rows(runs: Mapping[Config, Runs], seed: int = 0) -> list[dict[str, Any]]:
    """Return one dictionary per config.

    Speeds are medians over timed repeats, speed-ups medians of ratios within a repeat. Their
    ``_low`` and ``_high`` are the INTERVAL percentiles over resampled repeats, the same ones
    for all configs; a repeat has texts and moments of its own, so both are covered.
    """
    repeats = len(next(iter(runs.values())).timed)
    draws = resamples(repeats, np.random.default_rng(seed))
    return [_row(line, runs, draws) for line in runs]


def _row(line: Config, runs: Mapping[Config, Runs], draws: Draws) -> dict[str, Any]:
    own = runs[line]
    name, knob = label(line.method)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "method": name,
        "knob": knob,
        "verifier": None if name in BASELINES else line.verifier,
        "num_draft_tokens": line.width,
        "batch": line.batch,
        "tokens_per_second_min": float(own.speeds.min()),
        "tokens_per_second_max": float(own.speeds.max()),
        "tokens": _total(own.judged, "tokens"),
    }
    row |= _spread("tokens_per_second", own.speeds, draws)
    for column, rival in (
        ("speedup_over_plain", Config(PLAIN, 0, line.batch)),
        ("speedup_over_hf_plain", Config(HF_PLAIN, 0, line.batch)),
        ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.width, line.batch)),
    ):
        if rival in runs:
            found = _spread(column, own.speeds / runs[rival].speeds, draws)
            row |= {key: value for key, value in found.items() if key in row}
    return row | _calls(own) | _cost(own) | _quality(own.judged)


def _spread(
    column: str,
    values: PerRepeat,
    draws: Draws,
) -> dict[str, float]:
    low, high = np.percentile(np.median(values[draws], axis=1), INTERVAL).tolist()
    return {column: float(np.median(values)), f"{column}_low": low, f"{column}_high": high}


def _total(records: Records, name: str) -> Any:
    return sum(record[name] for record in records)


def _calls(own: Runs) -> dict[str, Any]:
    if "target_calls" not in own.judged[0]:
        return {}
    calls = _total(own.judged, "row_calls")
    every = [record["parts"] for records in own.timed for record in records]
    parts = [sum(part) for part in zip(*every, strict=True)]
    return {
        "target_calls": _total(own.judged, "target_calls"),
        "accepted_per_call": _total(own.judged, "accepted") / calls,
        "tokens_per_call": _total(own.judged, "tokens") / calls,
        "outside_forwards": sum(parts[2:]) / sum(parts),
    }


def _cost(own: Runs) -> dict[str, Any]:
    if "kl" not in own.judged[0]:
        return {}
    return {
        "emitted_kl_per_token": _total(own.judged, "kl") / _total(own.judged, "tokens"),
        "largest_row_kl": max(record["largest_row_kl"] for record in own.judged),
    }


def _quality(judged: Records) -> dict[str, Any]:
    pairs = [
        (value, length)
        for record in judged
        for value, length in zip(record["log_likelihood"], record["lengths"], strict=True)
        if value is not None
    ]
    nats, tokens = -sum(v * length for v, length in pairs), sum(length for _, length in pairs)
    verdicts = [v for record in judged for v in record["parses"] if v is not None]
    return {
        "target_nats_per_token": nats / tokens if tokens else None,
        "parses": statistics.mean(verdicts) if verdicts else None,
        "prompts_judged": len(verdicts),
    }
