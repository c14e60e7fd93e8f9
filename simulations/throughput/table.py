"""From decodes to one line per config."""

import codeop
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..common.decode import Harness
from ..common.grid import BASELINES, HF_ASSISTED, HF_PLAIN, PLAIN, Config, Job, Record, Runs, label
from ..common.statistics import Draws, resamples, spread


def record(harness: Harness, texts: Sequence[str], job: Job, metered: bool) -> dict[str, Any]:
    """Decode one group and return its line of the journal.

    ``metered`` adds cost and quality; what such a decode took is no speed to report.
    """
    done = harness.decode(job.config, job.group, again=job.repeat, meter=metered)
    if not metered:
        return done.record
    pair, likelihoods, parsed = harness.pair, [], []
    rows = harness.group(job.config.batch, job.group)
    for row, output in zip(rows, done.outputs, strict=True):
        likelihoods.append(target_log_likelihood(pair.target, harness.prompts[row], output))
        text = pair.tokenizer.decode(output, skip_special_tokens=True)
        parsed.append(parses_so_far(texts[row], text))
    lengths = [len(output) for output in done.outputs]
    return done.record | {"log_likelihood": likelihoods, "lengths": lengths, "parses": parsed}


def parses_so_far(prompt: str, completion: str) -> bool | None:
    """Say whether the text up to its last whole line can still become a Python program.

    None if the prompt's own whole lines cannot, or no line of the completion is whole.
    """
    whole = _whole_lines(prompt + completion)
    if not _can_become_python(_whole_lines(prompt)) or len(whole) <= len(prompt):
        return None
    return _can_become_python(whole)


@torch.inference_mode()
def target_log_likelihood(
    model: Any, prompt: Sequence[int], completion: Sequence[int]
) -> float | None:
    """Return the target's mean ln q of the completion's tokens at temperature 1, nats a token."""
    if not len(completion):
        return None
    text = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(-1, text[0, len(prompt) :, None]).mean())


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _can_become_python(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in a string
        try:
            codeop.compile_command(text.rstrip() + "\n", symbol="exec")
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False
    return True


COLUMNS = (
    "method knob verifier num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max tokens_per_second_low tokens_per_second_high speedup_over_plain "
    "speedup_over_plain_low speedup_over_plain_high speedup_over_hf_plain "
    "speedup_over_hf_assisted accepted_per_call tokens_per_call target_calls tokens "
    "outside_forwards emitted_kl_per_token largest_row_kl target_nats_per_token parses "
    "prompts_judged"
).split()


def rows(runs: Mapping[Config, Runs], seed: int = 0) -> list[dict[str, Any]]:
    """Return one dictionary per config.

    Speeds are medians over timed repeats, speed-ups medians of ratios within a repeat. Their
    ``_low`` and ``_high`` are the INTERVAL percentiles over resampled repeats, the same ones
    for all configs; a repeat has texts and moments of its own, so both are covered.
    """
    draws = resamples(len(next(iter(runs.values())).timed), seed)
    return [_row(line, runs, draws) for line in runs]


def _row(line: Config, runs: Mapping[Config, Runs], draws: Draws) -> dict[str, Any]:
    own = runs[line]
    name, knob = label(line.method)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "method": name,
        "knob": knob,
        "verifier": None if name in BASELINES else line.judge,
        "num_draft_tokens": line.width,
        "batch": line.batch,
        "tokens_per_second_min": float(own.speeds.min()),
        "tokens_per_second_max": float(own.speeds.max()),
        "tokens": own.total("tokens"),
    }
    row |= spread("tokens_per_second", own.speeds, draws)
    for column, rival in (
        ("speedup_over_plain", Config(PLAIN, 0, line.batch)),
        ("speedup_over_hf_plain", Config(HF_PLAIN, 0, line.batch)),
        ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.width, line.batch)),
    ):
        if rival in runs:
            found = spread(column, own.speeds / runs[rival].speeds, draws)
            row |= {key: value for key, value in found.items() if key in row}
    if "target_calls" in own.judged[0]:
        row |= {
            "target_calls": own.total("target_calls"),
            "accepted_per_call": own.ratio("accepted", "row_calls"),
            "tokens_per_call": own.ratio("tokens", "row_calls"),
            "outside_forwards": own.share([2, 3]),
        }
    if "kl" in own.judged[0]:
        row |= {
            "emitted_kl_per_token": own.ratio("kl", "tokens"),
            "largest_row_kl": max(record["largest_row_kl"] for record in own.judged),
        }
    return row | _quality(own.judged)


def _quality(judged: list[Record]) -> dict[str, Any]:
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
