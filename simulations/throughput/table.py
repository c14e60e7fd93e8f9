"""From decodes to one line per config, and to two families of policies at equal emitted KL.

Each family is a curve, tokens per second against the logarithm of the emitted KL per token,
known at the knob values that were run. Between them it is read off a monotone cubic; outside them
nothing is said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from cactus_theory.base.prompts import Prompt
from cactus_theory.decoding.stream import completion

from ..common.answers import Score
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
from ..common.statistics import Curve, Draws, hermite, interval, monotone_curve, resamples, spread


def record(
    harness: Harness,
    prompts: Sequence[Prompt],
    job: Job,
    metered: bool,
    score: Score | None = None,
) -> dict[str, Any]:
    """Decode one group and return its line of the journal.

    ``metered`` adds cost and quality; what such a decode took is no speed to report.
    """
    decode = harness.decode(job.config, job.group, repeat=job.repeat, meter=metered)
    if not metered:
        return decode.record
    pair, likelihoods, scores = harness.pair, [], []
    rows = harness.group(job.config.batch, job.group)
    for row, output in zip(rows, decode.outputs, strict=True):
        likelihoods.append(target_log_likelihood(pair.target, harness.prompts[row], output))
        if score is not None:
            text = completion(pair.tokenizer, harness.prompts[row], output)
            scores.append(score(prompts[row], text))
    record = decode.record | {"log_likelihood": likelihoods}
    return record | ({} if score is None else {"scores": scores})


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


COLUMNS = (
    "method knob verifier num_draft_tokens batch tokens_per_second tokens_per_second_min "
    "tokens_per_second_max tokens_per_second_low tokens_per_second_high speedup_over_plain "
    "speedup_over_plain_low speedup_over_plain_high speedup_over_hf_plain "
    "speedup_over_hf_assisted accepted_per_call tokens_per_call target_calls tokens "
    "outside_forwards emitted_kl_per_token largest_row_kl target_nats_per_token"
).split()


def rows(runs: Mapping[Config, Runs], seed: int = 0) -> list[dict[str, Any]]:
    """Return one dictionary per config.

    Speeds are medians over timed repeats, speed-ups medians of ratios within a repeat. Their
    ``_low`` and ``_high`` are the INTERVAL percentiles over resampled prompts, or batches of them,
    the same ones for all configs of a batch size.
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
        ("speedup_over_plain", Config(PLAIN, 0, line.batch)),
        ("speedup_over_hf_plain", Config(HF_PLAIN, 0, line.batch)),
        ("speedup_over_hf_assisted", Config(HF_ASSISTED, line.width, line.batch)),
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


# nats per token at which families are compared
LEVELS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
DEFAULT = ("band:price", "cactus:delta")


def families_of(names: Sequence[str] | None, lines: Sequence[Config]) -> tuple[str, str] | None:
    """Return the two families to compare; None if none are named and the default are not there.

    ValueError for a name with fewer than two knob values in the run.
    """
    first, second = names or DEFAULT
    sizes = {name: len({line.method for line in lines if line.family == name})
             for name in (first, second)}  # fmt: skip
    short = [name for name, size in sizes.items() if size < 2]
    if short and names is None:
        return None
    if short:
        families = ", ".join(sorted({line.family for line in lines if line.width}))
        raise ValueError(
            f"--compare: {short[0]} needs at least two knob values among the policies; "
            f"got {sizes[short[0]]}, families are {families}"
        )
    return first, second


def equal_kl_rows(
    runs: Mapping[Config, Runs], families: tuple[str, str], seed: int = 0
) -> list[dict[str, Any]]:
    """Return one dictionary per level, K and batch that both families reach.

    ``ratio`` is the first family's tokens per second over the second's. Its interval comes
    from resampling prompts, or batches of them, the same ones for both families.
    """
    rows = []
    for width, batch in sorted({(line.width, line.batch) for line in runs if line.width}):
        members = [
            [line_runs for line, line_runs in runs.items()
             if (line.family, line.width, line.batch) == (name, width, batch)]
            for name in families
        ]  # fmt: skip
        if min(map(len, members)) >= 2:
            place = {"num_draft_tokens": width, "batch": batch}
            rows += [place | row for row in _compared(members, families, seed)]
    return rows


def nothing(families: tuple[str, str]) -> str:
    """Return why there is no table."""
    levels = ", ".join(f"{level:g}" for level in LEVELS)
    return (
        f"nothing to compare at equal KL: {' and '.join(families)} need two knob values each at "
        f"one K and batch, metered on both sides of one of {levels} nats"
    )


def _compared(
    members: list[list[Runs]], families: tuple[str, str], seed: int
) -> list[dict[str, Any]]:
    draws = resamples(len(members[0][0].timed[0]), seed)
    both = [curves(family)[0] for family in members]
    drawn = list(zip(*(curves(family, draws) for family in members), strict=True))
    rows = []
    for level in LEVELS:
        first, second = (read(level, curve) for curve in both)
        if first is None or second is None:
            continue
        low, high = _interval(level, drawn)
        rows.append(
            {
                "kl": level,
                "first": families[0],
                "second": families[1],
                "tokens_per_second_first": first,
                "tokens_per_second_second": second,
                "ratio": first / second,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return rows


def _interval(level: float, drawn: Sequence[tuple[Curve, Curve]]) -> list[float | None]:
    pairs = [(read(level, first), read(level, second)) for first, second in drawn]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return [*interval(ratios)] if ratios else [None, None]


def curves(members: Sequence[Runs], draws: Draws | None = None) -> list[Curve]:
    """Return one curve per draw of prompts; without, one of all."""
    points = []
    for runs in members:
        groups = len(runs.timed[0])
        own = np.arange(groups)[None] if draws is None else draws
        cost = np.array([[record["kl"], record["tokens"]] for record in runs.metered])
        kl, tokens = np.moveaxis(cost.reshape(-1, groups, 2).sum(0)[own], -1, 0).sum(-1)
        points.append(np.stack([kl / tokens, np.median(runs.drawn(own), axis=-1)], -1))
    return [rising(family) for family in np.stack(points, 1)]


def rising(points: Float[np.ndarray, "members 2"]) -> Curve:
    """Return the curve of tokens per second over ln KL through the points that cost something."""
    kl, speed = points[points[:, 0] > 0].T
    return monotone_curve(np.log(kl), speed)


def read(level: float, curve: Curve) -> float | None:
    """Return the curve's height at KL ``level``, None outside its points."""
    return hermite(float(np.log(level)), *curve)
