"""From finished decodes to one line per config."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .grid import HF_ASSISTED, HF_PLAIN, PLAIN, Config, Job

COLUMNS = (
    "method knob num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max speedup_over_plain speedup_over_hf_plain speedup_over_hf_assisted "
    "accepted_per_call tokens_per_call target_calls tokens outside_forwards emitted_kl_per_token "
    "largest_row_kl target_nats_per_token parses prompts_judged"
).split()


def rows(
    lines: Sequence[Config], groups: Mapping[int, int], repeats: int, results: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return one dictionary per config.

    Parameters
    ----------
    lines : the configs.
    groups : batch size → how many groups the prompts make.
    repeats : timed repeats; speed is their median, ``_min`` and ``_max`` their spread.
    results : job key → record, as :func:`simulations.throughput.methods.decode` gives them.
    """
    records = {
        line: [
            [results[Job(line, repeat, group).key] for group in range(groups[line.batch])]
            for repeat in range(repeats + 1)
        ]
        for line in lines
    }
    table = [_row(line, records[line]) for line in lines]
    for line, row in zip(lines, table, strict=True):
        for column, rival in (
            ("speedup_over_plain", Config(PLAIN, 0, line.batch)),
            ("speedup_over_hf_plain", Config(HF_PLAIN, 0, line.batch)),
            ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.width, line.batch)),
        ):
            if rival in records:
                row[column] = _ratio(records[line], records[rival])
    return table


def _row(line: Config, repeats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    judged, timed = repeats[0], repeats[1:] or repeats
    speeds = [_speed(records) for records in timed]
    name, _, knob = line.method.partition(":")
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "method": name,
        "knob": knob,
        "num_draft_tokens": line.width,
        "batch": line.batch,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_min": min(speeds),
        "tokens_per_second_max": max(speeds),
        "tokens": sum(record["tokens"] for record in judged),
    }
    if "target_calls" in judged[0]:
        row |= _calls(judged, timed)
    if "kl" in judged[0]:
        row["emitted_kl_per_token"] = sum(record["kl"] for record in judged) / row["tokens"]
        row["largest_row_kl"] = max(record["largest_row_kl"] for record in judged)
    return row | _quality(judged)


def _speed(records: list[dict[str, Any]]) -> float:
    return sum(r["tokens"] for r in records) / sum(r["seconds"] for r in records)


def _ratio(own: list[list[dict[str, Any]]], rival: list[list[dict[str, Any]]]) -> float:
    """Return the median over repeats of the ratio of speeds made side by side."""
    pairs = list(zip(own, rival, strict=True))
    return statistics.median(_speed(a) / _speed(b) for a, b in pairs[1:] or pairs)


def _calls(judged: list[dict[str, Any]], timed: list[list[dict[str, Any]]]) -> dict[str, Any]:
    calls = sum(record["row_calls"] for record in judged)
    parts = [sum(part) for part in zip(*(r["parts"] for rs in timed for r in rs), strict=True)]
    return {
        "target_calls": sum(record["target_calls"] for record in judged),
        "accepted_per_call": sum(record["accepted"] for record in judged) / calls,
        "tokens_per_call": sum(record["tokens"] for record in judged) / calls,
        "outside_forwards": sum(parts[2:]) / sum(parts),
    }


def _quality(judged: list[dict[str, Any]]) -> dict[str, Any]:
    nats = tokens = 0.0
    for record in judged:
        for value, length in zip(record["log_likelihood"], record["lengths"], strict=True):
            if value is not None:
                nats, tokens = nats - value * length, tokens + length
    verdicts = [v for record in judged for v in record["parses"] if v is not None]
    return {
        "target_nats_per_token": nats / tokens if tokens else None,
        "parses": sum(verdicts) / len(verdicts) if verdicts else None,
        "prompts_judged": len(verdicts),
    }
