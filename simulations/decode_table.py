"""Decode the same prompts with plain target and every policy; a table row per policy and K.

K, the number of drafted tokens a round, is tuned for each policy: the fastest is marked. Runs
are interleaved (repeat, prompt, policy), so that a machine whose speed drifts is fair to all.
Speed is the median over repeats; law and cost come from one metered repeat, whose rows are
also audited against what the policy declares.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cactus_theory as ct
from cactus_theory.decoding import GenerationResult, Pair, generate, generate_plain

PLAIN = "plain"
COLUMNS = (
    "policy knob num_draft_tokens tuned tokens_per_second tokens_per_second_min "
    "tokens_per_second_max speedup accepted_per_call tokens_per_call tokens target_calls "
    "acceptance emitted_kl_per_token largest_row_kl verified_rows declares held "
    "share_over_budget largest_spent"
).split()
DRAWN_ROWS = 256  # rows audited at once: bounds memory at large vocabularies


@dataclass
class Runs:
    """What one policy did at one K (0 for plain): seconds and tokens a repeat, metered results."""

    spec: str
    width: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    metered: list[GenerationResult] = field(default_factory=list)


def measure(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    specs: Sequence[str],
    *,
    widths: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    seed: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Return one dictionary for each policy and K, plain target first.

    Parameters
    ----------
    prompts : token ids, each at least one.
    specs : policies beside the plain target.
    widths : the K to try, each ≥ 1.
    repeats : timed runs of every prompt, after one untimed, metered one.
    on_run : called after every run; there are ``run_count`` of them.
    """
    runs = [Runs(PLAIN, 0)] + [Runs(spec, width) for spec in specs for width in widths]
    for repeat in range(repeats + 1):
        for own in runs:
            own.seconds.append(0.0)
            own.tokens.append(0)
        for number, prompt in enumerate(prompts):
            for own in runs:
                result = _decode(pair, prompt, own, seed + number, repeat == 0, max_new_tokens)
                own.seconds[-1] += result.seconds.total
                own.tokens[-1] += result.num_tokens
                if repeat == 0:
                    own.metered.append(result)
                on_run()
    plain = _speed(runs[0])
    rows = [_row(own, plain) for own in runs]
    for row in rows:
        rivals = [r["speedup"] for r in rows if (r["policy"], r["knob"]) == _rule(row)]
        row["tuned"] = row["speedup"] == max(rivals)
    return rows


def _rule(row: dict[str, Any]) -> tuple[str, str]:
    return row["policy"], row["knob"]


def run_count(prompts: int, specs: int, widths: int, repeats: int) -> int:
    """Return how many decodes :func:`measure` makes."""
    return prompts * (specs * widths + 1) * (repeats + 1)


def _decode(
    pair: Pair,
    prompt: Sequence[int],
    runs: Runs,
    seed: int,
    metered: bool,
    room: int,
) -> GenerationResult:
    ids = torch.tensor([list(prompt)], device=pair.target.device)
    ends = pair.target.generation_config.eos_token_id
    if runs.spec == PLAIN:
        return generate_plain(pair.target, ids, eos_token_ids=ends, seed=seed, max_new_tokens=room)
    return generate(
        pair.target,
        pair.draft,
        ids,
        policy=runs.spec,
        num_draft_tokens=runs.width,
        eos_token_ids=ends,
        seed=seed,
        meter=metered,
        record_rows=metered,
        max_new_tokens=room,
    )


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
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "policy": runs.spec.partition(":")[0],
        "knob": runs.spec.partition(":")[2],
        "num_draft_tokens": runs.width,
        "tokens_per_second": _speed(runs),
        "tokens_per_second_min": min(timed),
        "tokens_per_second_max": max(timed),
        "speedup": _speed(runs) / plain,
        "accepted_per_call": accepted / calls,
        "tokens_per_call": tokens / calls,
        "tokens": tokens,
        "target_calls": calls,
    }
    return row if runs.spec == PLAIN else row | _cost(runs, tokens)


def _cost(runs: Runs, tokens: int) -> dict[str, Any]:
    """Return the emitted KL and whether the declared budget held on the verified rows."""
    meters = [result.meter for result in runs.metered if result.meter is not None]
    rule = ct.policy(runs.spec)
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
