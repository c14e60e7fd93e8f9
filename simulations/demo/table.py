"""Decode the same prompts with plain target and every policy; a table row per policy and K.

K, the number of drafted tokens a round, is tuned for each policy: the fastest is marked. Runs
are interleaved (repeat, prompt, shuffled policies), so that a drift of the machine's speed
affects all alike. Speed is the median over repeats; acceptance and cost come from one metered
repeat, whose rows are also audited against what the policy declares.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.decoding import GenerationResult

from ..common.decode import Harness
from ..common.grid import PLAIN, Config, Job, configs, jobs, label
from ..common.progress import Progress

COLUMNS = (
    "policy knob num_draft_tokens tuned tokens_per_second tokens_per_second_min "
    "tokens_per_second_max speedup accepted_per_call tokens_per_call tokens target_calls "
    "acceptance emitted_kl_per_token largest_row_kl verified_rows declares held "
    "share_over_budget largest_spent"
).split()
DRAWN_ROWS = 256  # rows audited at once: bounds memory at large vocabularies


@dataclass
class Runs:
    """What one line did: seconds and tokens a repeat, the metered results of repeat 0."""

    config: Config
    seconds: list[float]
    tokens: list[int]
    metered: list[GenerationResult] = field(default_factory=list)


def measure(
    harness: Harness,
    specs: Sequence[str],
    *,
    widths: Sequence[int],
    repeats: int,
) -> list[dict[str, Any]]:
    """Return one dictionary for each policy and K, plain target first.

    Parameters
    ----------
    harness : the pair and the prompts.
    specs : policies, in addition to the plain target.
    widths : the K to try, each ≥ 1.
    repeats : timed runs of every prompt, after one untimed, metered one.
    """
    lines = configs([PLAIN], specs, widths, [1])
    runs = {line: Runs(line, [0.0] * (repeats + 1), [0] * (repeats + 1)) for line in lines}
    todo = list(jobs(lines, len(harness.prompts), repeats, seed=harness.seed))
    with Progress("decoding", len(todo)) as progress:
        for job in todo:
            _run(harness, job, runs[job.config])
            progress.advance()
    plain = _speed(runs[lines[0]])
    rows = [_row(own, plain) for own in runs.values()]
    for row in rows:
        rivals = [r["speedup"] for r in rows if (r["policy"], r["knob"]) == _rule(row)]
        row["tuned"] = row["speedup"] == max(rivals)
    return rows


def _rule(row: dict[str, Any]) -> tuple[str, str]:
    return row["policy"], row["knob"]


def _run(harness: Harness, job: Job, own: Runs) -> None:
    metered = job.repeat == 0
    done = harness.decode(job.config, job.group, meter=metered, record_rows=metered)
    assert done.result is not None
    own.seconds[job.repeat] += done.seconds
    own.tokens[job.repeat] += done.num_tokens
    if metered:
        own.metered.append(done.result)


def _speed(runs: Runs) -> float:
    """Return the median tokens/s of the timed repeats (of the only run if none was timed)."""
    pairs = list(zip(runs.tokens, runs.seconds, strict=True))
    return statistics.median(tokens / seconds for tokens, seconds in pairs[1:] or pairs)


def _row(runs: Runs, plain: float) -> dict[str, Any]:
    speeds = [t / s for t, s in zip(runs.tokens, runs.seconds, strict=True)]
    timed = speeds[1:] or speeds
    results = runs.metered
    calls = sum(result.target_calls for result in results)
    accepted = sum(result.num_accepted for result in results)
    tokens = sum(result.num_tokens for result in results)
    policy, knob = label(runs.config.method)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "policy": policy,
        "knob": knob,
        "num_draft_tokens": runs.config.width,
        "tokens_per_second": _speed(runs),
        "tokens_per_second_min": min(timed),
        "tokens_per_second_max": max(timed),
        "speedup": _speed(runs) / plain,
        "accepted_per_call": accepted / calls,
        "tokens_per_call": tokens / calls,
        "tokens": tokens,
        "target_calls": calls,
    }
    return row if runs.config.method == PLAIN else row | _cost(runs, tokens)


def _cost(runs: Runs, tokens: int) -> dict[str, Any]:
    """Return the emitted KL and whether the declared budget held on the verified rows."""
    meters = [result.meter for result in runs.metered if result.meter is not None]
    rule = ct.policy(runs.config.method)
    audits = [audit for result in runs.metered for audit in _audits(rule, result)]
    budget = rule.declares.budget
    row: dict[str, Any] = {
        "acceptance": _mean(audits, "acceptance"),
        "emitted_kl_per_token": sum(meter.kl for meter in meters) / tokens,
        "largest_row_kl": max(meter.largest_row_kl for meter in meters),
        "verified_rows": sum(meter.rows for meter in meters),
        "declares": "no budget" if budget is None else str(budget),
    }
    if budget is not None:
        row["held"] = all(bool(audit.within.all()) for audit in audits)
        row["largest_spent"] = max(float(audit.spent.max()) for audit in audits)
        if budget.scope == "per proposal":
            row["share_over_budget"] = _mean(audits, "over_share")
    return row


def _audits(rule: ct.Policy, result: GenerationResult) -> list[ct.Audit]:
    rows = result.rows
    if rows is None or not len(rows.target_probs):
        return []
    pairs = zip(
        rows.target_probs.split(DRAWN_ROWS), rows.draft_probs.split(DRAWN_ROWS), strict=True
    )
    return [ct.audit(rule, q, p) for q, p in pairs]


def _mean(audits: list[ct.Audit], name: str) -> float:
    return float(torch.cat([getattr(audit, name) for audit in audits]).mean())
