"""Decode the same prompts with plain target and every policy; a table row per policy and K.

K, the number of drafted tokens a round, is tuned for each policy: the fastest is marked. Runs
are interleaved (repeat, prompt, shuffled policies), so that a drift of the machine's speed
affects all alike. Speed is the median over repeats; acceptance and cost come from one metered
repeat, whose rows are also audited against what the policy declares.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory.decoding import GenerationResult

from ..common.decode import Harness
from ..common.grid import PLAIN, Config, Grid, Job, Record, Runs, configs, label

COLUMNS = (
    "policy knob num_draft_tokens tuned tokens_per_second tokens_per_second_min "
    "tokens_per_second_max speedup accepted_per_call tokens_per_call tokens target_calls "
    "acceptance emitted_kl_per_token largest_row_kl verified_rows declares held "
    "share_over_budget largest_spent"
).split()
DRAWN_ROWS = 256  # rows audited at once: bounds memory at large vocabularies


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
    grid = Grid(lines, len(harness.prompts), repeats, seed=harness.seed)

    def decoded(job: Job) -> Record:
        metered = job.repeat == 0
        done = harness.decode(job.config, job.group, meter=metered, record_rows=metered)
        assert done.result is not None
        audits = _audits(job.config, done.result) if metered else []
        return done.record | {"audits": audits}

    runs = grid.runs(grid.fill(decoded))
    plain = float(np.median(runs[lines[0]].speeds))
    rows = [_row(line, own, plain) for line, own in runs.items()]
    fastest: dict[tuple[str, str], float] = {}
    for row in sorted(rows, key=lambda row: row["speedup"]):
        fastest[row["policy"], row["knob"]] = row["speedup"]
    for row in rows:
        row["tuned"] = row["speedup"] == fastest[row["policy"], row["knob"]]
    return rows


def _row(line: Config, own: Runs, plain: float) -> dict[str, Any]:
    policy, knob = label(line.method)
    median = float(np.median(own.speeds))
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "policy": policy,
        "knob": knob,
        "num_draft_tokens": line.width,
        "tokens_per_second": median,
        "tokens_per_second_min": float(own.speeds.min()),
        "tokens_per_second_max": float(own.speeds.max()),
        "speedup": median / plain,
        "accepted_per_call": own.ratio("accepted", "target_calls"),
        "tokens_per_call": own.ratio("tokens", "target_calls"),
        "tokens": own.total("tokens"),
        "target_calls": own.total("target_calls"),
    }
    return row if line.method == PLAIN else row | _cost(line, own)


def _cost(line: Config, own: Runs) -> dict[str, Any]:
    """Return the emitted KL and whether the declared budget held on the verified rows."""
    audits: list[ct.Audit] = [audit for record in own.judged for audit in record["audits"]]
    budget = ct.policy(line.method).declares.budget
    row: dict[str, Any] = {
        "acceptance": _mean(audits, "acceptance"),
        "emitted_kl_per_token": own.ratio("kl", "tokens"),
        "largest_row_kl": max(record["largest_row_kl"] for record in own.judged),
        "verified_rows": own.total("rows"),
        "declares": "no budget" if budget is None else str(budget),
    }
    if budget is not None:
        row["held"] = all(bool(audit.within.all()) for audit in audits)
        row["largest_spent"] = max(float(audit.spent.max()) for audit in audits)
        if budget.scope == "per proposal":
            row["share_over_budget"] = _mean(audits, "over_share")
    return row


def _audits(line: Config, result: GenerationResult) -> list[ct.Audit]:
    rows = result.rows
    if rows is None or not len(rows.target_probs):
        return []
    pairs = zip(
        rows.target_probs.split(DRAWN_ROWS), rows.draft_probs.split(DRAWN_ROWS), strict=True
    )
    return [ct.audit(ct.policy(line.method), q, p) for q, p in pairs]


def _mean(audits: list[ct.Audit], name: str) -> float:
    return float(torch.cat([getattr(audit, name) for audit in audits]).mean())
