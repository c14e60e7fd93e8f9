"""What is kept of one decode: how long it took, what came out, what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cactus_theory.decoding import GenerationResult

from ..common.decode import Decoded, Harness
from ..common.grid import Config
from .quality import parses_so_far, target_log_likelihood


def record(
    harness: Harness, texts: Sequence[str], config: Config, group: int, again: int, metered: bool
) -> dict[str, Any]:
    """Decode one group and return its line of the journal.

    ``metered`` adds cost and quality; what such a decode took is no speed to report.
    """
    done = harness.decode(config, group, again=again, meter=metered)
    kept: dict[str, Any] = {"seconds": done.seconds, "tokens": done.num_tokens}
    if done.result is not None:
        kept |= _counts(done.result)
        if done.result.meter is not None:
            meter = done.result.meter
            kept |= {"rows": meter.rows, "kl": meter.kl, "largest_row_kl": meter.largest_row_kl}
    if metered:
        kept |= _quality(harness, texts, harness.group(config.batch, group), done)
    return kept


def _counts(result: GenerationResult) -> dict[str, Any]:
    seconds = result.seconds
    return {
        "target_calls": result.target_calls,
        "row_calls": result.row_calls,
        "accepted": result.num_accepted,
        "histogram": list(result.accepted_histogram),
        "parts": [seconds.draft, seconds.target, seconds.verify, seconds.other],
    }


def _quality(harness: Harness, texts: Sequence[str], rows: range, done: Decoded) -> dict[str, Any]:
    pair = harness.pair
    likelihoods, parsed = [], []
    for row, output in zip(rows, done.outputs, strict=True):
        likelihoods.append(target_log_likelihood(pair.target, harness.prompts[row], output))
        text = pair.tokenizer.decode(output, skip_special_tokens=True)
        parsed.append(parses_so_far(texts[row], text))
    lengths = [len(output) for output in done.outputs]
    return {"log_likelihood": likelihoods, "lengths": lengths, "parses": parsed}
