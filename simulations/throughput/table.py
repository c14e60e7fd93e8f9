"""Make the table of ``throughput`` from decodes, one row for each config."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..common.decode import Harness
from ..common.grid import (
    HF_ASSISTED,
    HF_PLAIN,
    PLAIN,
    Config,
    Job,
    Record,
    Runs,
)
from ..common.statistics import resamples, spread


def record(harness: Harness, job: Job, metered: bool) -> dict[str, Any]:
    """Decode one group of prompts and return the record for the journal.

    ``metered`` adds nats and quality; the seconds of such a decode are not reported as a speed.
    """
    decode = harness.decode(job.config, job.group, repeat=job.repeat, meter=metered)
    if not metered:
        return decode.record
    rows = harness.group(job.config.batch, job.group)
    likelihoods = [
        target_log_likelihood(harness.pair.target, harness.prompts[row], output)
        for row, output in zip(rows, decode.outputs, strict=True)
    ]
    return decode.record | {"log_likelihood": likelihoods}


@torch.inference_mode()
def target_log_likelihood(
    model: Any, prompt: Sequence[int], completion: Sequence[int]
) -> float | None:
    """Return the mean ln q of the completion's tokens at temperature 1, in nats per token."""
    if not len(completion):
        return None
    text = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(-1, text[0, len(prompt) :, None]).mean())


COLUMNS = (
    "method knob verifier num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max tokens_per_second_low tokens_per_second_high speedup_over_plain "
    "speedup_over_plain_low speedup_over_plain_high speedup_over_hf_plain "
    "speedup_over_hf_assisted accepted_per_call tokens_per_call target_calls tokens "
    "outside_forwards emitted_kl_per_token largest_row_kl target_nats_per_token"
).split()


def rows(runs: Mapping[Config, Runs], seed: int = 0) -> list[dict[str, Any]]:
    """Return one dictionary per config.

    Speeds are medians over timed repeats, speed-ups are medians of ratios within a repeat. The
    columns ``_low`` and ``_high`` are the INTERVAL percentiles over resampled prompts or batches;
    all configs of a batch size have the same resamples.
    """
    return [_row(line, runs, seed) for line in runs]


def _row(line: Config, runs: Mapping[Config, Runs], seed: int) -> dict[str, Any]:
    line_runs = runs[line]
    draws = resamples(len(line_runs.timed[0]), seed)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | line.columns
    row |= {
        "tokens_per_second_min": float(line_runs.speeds.min()),
        "tokens_per_second_max": float(line_runs.speeds.max()),
        "tokens": line_runs.total("tokens"),
    }
    row |= spread("tokens_per_second", line_runs.speeds, line_runs.drawn(draws))
    for column, rival in (
        ("speedup_over_plain", Config(PLAIN, 0, batch=line.batch)),
        ("speedup_over_hf_plain", Config(HF_PLAIN, 0, batch=line.batch)),
        ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.num_draft_tokens, batch=line.batch)),
    ):
        if rival in runs:
            drawn = line_runs.drawn(draws) / runs[rival].drawn(draws)
            ratios = spread(column, line_runs.speeds / runs[rival].speeds, drawn)
            row |= {key: value for key, value in ratios.items() if key in row}
    if "target_calls" in line_runs.metered[0]:
        row |= {
            "target_calls": line_runs.total("target_calls"),
            "accepted_per_call": line_runs.ratio("accepted", "row_calls"),
            "tokens_per_call": line_runs.ratio("tokens", "row_calls"),
            "outside_forwards": line_runs.share([2, 3]),
        }
    if "kl" in line_runs.metered[0]:
        row |= {
            "emitted_kl_per_token": line_runs.ratio("kl", "tokens"),
            "largest_row_kl": max(record["largest_row_kl"] for record in line_runs.metered),
        }
    return row | _quality(line_runs.metered)


def _quality(metered: list[Record]) -> dict[str, Any]:
    pairs = [
        (value, length)
        for record in metered
        if "log_likelihood" in record
        for value, length in zip(record["log_likelihood"], record["lengths"], strict=True)
        if value is not None
    ]
    nats, tokens = -sum(v * length for v, length in pairs), sum(length for _, length in pairs)
    return {"target_nats_per_token": nats / tokens if tokens else None}
