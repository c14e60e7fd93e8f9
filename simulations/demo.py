"""The main job: two language models in, one table and two pictures out.

Logs both models' rows along text the target wrote, solves the optimal acceptance on one of
them three ways, audits every policy on all of them, decodes the same prompts with each
policy and reports what it cost. Writes everything to ``--out`` as CSV, PDF and PNG.

K, the number of drafted tokens a round, is tuned for each policy: the fastest is marked. Runs
are interleaved (repeat, prompt, shuffled policies), so that a drift of the machine's speed
affects all alike. Speed is the median over repeats; acceptance and cost come from one metered
repeat, whose rows are also audited against what the policy declares.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.tables import rule, text_table
from cactus_theory.commands.flags import given_prompts
from cactus_theory.commands.models import loaded
from cactus_theory.decoding import GenerationResult, Pair
from cactus_theory.emitted import Audit
from cactus_theory.optimum.acceptance import OptimalAcceptance
from cactus_theory.verify.node import stacked

from .common.decode import Harness
from .common.grid import PLAIN, Config, Grid, Job, Record, Runs, checked_policy, configs, label
from .common.inputs import add_decode_arguments, prompt_ids
from .common.results import columns, publish
from .common.walk import log_rows

POLICIES = (
    "speculative",
    "typical",
    "cactus:delta=0.01",
    "cactus:delta=0.1",
    "cactus:delta=1",
    "cactus_exact:delta=0.1",
    "band:delta=0.1",
    "band:delta=0.5",
    "band:price=2",
    "band:price=0.5",
    "band:price=0.25",
)
# tokens sampled after each prompt, for the audited rows
LOGGED_TOKENS = 32
PICTURES = ("policies", "band_row")
# column of the table printed at the end → its head
SPEED_HEADS = {
    "policy": "policy",
    "knob": "knob",
    "num_draft_tokens": "K",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "tokens_per_call": "tokens\n/call",
    "emitted_kl_per_token": "emitted KL\n/token",
    "largest_row_kl": "largest\nrow KL",
    "held": "declared\nbudget held",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_decode_arguments(
        parser, policies=POLICIES, out="demo", widths=[3, 7], repeats=3, num_prompts=8,
        max_new_tokens=48,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    specs = [checked_policy(spec) for spec in args.policy]  # a typo shows before anything runs
    asked, pair = given_prompts(args)[: args.num_prompts], loaded(args)
    prompts = prompt_ids(args, pair, asked)

    print(rule("rows along a real generation"))
    q, p = log_rows(pair, prompts, LOGGED_TOKENS, args.seed)
    overlap = torch.minimum(q, p).sum(-1).mean()
    print(
        f"{len(q)} rows of {q.shape[1]:,} tokens; the draft overlaps the target by "
        f"{overlap:.3f} (Σ min(p, q), mean)\n"
    )
    tables = {"band_row": solve(q, p, pair), "audit": audit_all(specs, q, p)}
    print(rule(f"decoding {len(prompts)} prompts, K of {args.num_draft_tokens} drafted a round"))
    harness = Harness(pair, prompts, args.max_new_tokens, args.seed)
    sizes = {"widths": args.num_draft_tokens, "repeats": args.repeats}
    tables["policies"] = measure(harness, specs, **sizes)
    print(_speed_table(tables["policies"], args))
    _write(tables, args, pair.dtype)
    return 0


def _speed_table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    title = (
        f"each at its fastest K of {args.num_draft_tokens} on these texts; temperature 1, "
        f"{args.num_prompts} prompts, {args.max_new_tokens} new tokens, medians of {args.repeats} "
        "interleaved runs"
    )
    return columns([row for row in rows if row["tuned"]], SPEED_HEADS, title)


def _write(tables: dict[str, list[dict[str, Any]]], args: argparse.Namespace, dtype: str) -> None:
    from paper_figures.__main__ import draw

    for name, rows in tables.items():
        publish(args, rows, args.out / f"{name}.csv", dtype=dtype)
    for name in PICTURES:
        draw(name, args.out, args.out)
    print("Nats buy speed: compare policies of equal emitted KL.")
    files = sorted(path.name for path in args.out.iterdir() if path.suffix in (".csv", ".png"))
    print(f"written to {args.out}/: {', '.join(files)}")


# budget of the solved row, in nats
SOLVED_DELTA = 0.1
# least and most chance of a rejection, without loss, on the row that is drawn
DRAWN_REJECTIONS = (0.3, 0.5)
# least probability, in either row, of a token that is drawn
DRAWN_MASS = 1e-4
PROGRAM_TOLERANCE = 1e-6
SOLVED_HEADS = ("", "acceptance", "price dA/dδ", "proof of optimality", "seconds")


def solve(q: Tensor, p: Tensor, pair: Pair) -> list[dict[str, Any]]:
    from solvers import optimal

    print(rule(f"the optimal acceptance on one row, KL ≤ {SOLVED_DELTA} nats"))
    rejected = (q - p).clamp(min=0.0).sum(-1)
    row = row_to_draw(q, rejected)
    start = time.perf_counter()
    optimum = ct.optimal_acceptance(q[row], p[row], delta=SOLVED_DELTA)
    elapsed = time.perf_counter() - start
    program = optimal.solve(q[row].numpy(), p[row].numpy(), divergence="kl", delta=SOLVED_DELTA)
    accepted = float(optimum.acceptance)
    lines = [
        ("lossless", f"{1 - float(rejected[row]):.9f}", "", "", ""),
        (
            "closed form", f"{accepted:.9f}", f"{float(optimum.price):.6f}",
            f"certificate gap {float(optimum.gap):.1e}", f"{elapsed:.4f}",
        ),
        (
            f"cvxpy ({program.solver})", f"{program.acceptance:.9f}", f"{program.price:.6f}",
            f"dual gap {program.gap:.1e}", f"{program.seconds:.4f}",
        ),
    ]  # fmt: skip
    print(text_table(SOLVED_HEADS, lines))
    distance = abs(accepted - program.acceptance)
    outcome = "agree" if distance <= PROGRAM_TOLERANCE else "DISAGREE"
    print(f"closed form and program {outcome}: they differ by {distance:.1e}\n")
    return _token_rows(q[row], p[row], optimum, pair)


def row_to_draw(q: Tensor, rejected: Tensor) -> int:
    """Return the row of largest entropy among those with a fair share of rejections."""
    low, high = DRAWN_REJECTIONS
    entropy = -torch.xlogy(q, q).sum(-1)
    fair = (rejected >= low) & (rejected <= high)
    if not bool(fair.any()):
        return int(rejected.argmax())
    return int(torch.where(fair, entropy, -1.0).argmax())


def _token_rows(
    q: Tensor, p: Tensor, optimum: OptimalAcceptance, pair: Pair
) -> list[dict[str, Any]]:
    """Return the row's tokens in order of p/q, with the band and what Cactus emits."""
    emitted = ct.emitted_law(ct.policy("cactus", delta=SOLVED_DELTA), q, p)
    order = (p / q).argsort()
    cumulative = q[order].cumsum(0)
    drawn = torch.maximum(q, p)[order] > DRAWN_MASS
    return [
        {
            "token": repr(pair.tokenizer.decode([int(token)])),
            "target_mass_below": float(below - q[token]),
            "q": float(q[token]),
            "p": float(p[token]),
            "band": float(optimum.target[token]),
            "cactus": float(emitted[token]),
            "lower": float(optimum.lower),
            "upper": float(optimum.upper),
            "delta": SOLVED_DELTA,
            "acceptance": float(optimum.acceptance),
            "speculative": float(torch.minimum(q, p).sum()),
        }
        for token, below in zip(order[drawn], cumulative[drawn], strict=True)
    ]


# column of the audit that is printed → its head
AUDIT_HEADS = {
    "policy": "policy", "acceptance": "acceptance", "emitted_kl": "emitted\nKL",
    "largest_emitted_kl": "largest", "best_acceptance_at_that_kl": "best\nacceptance\nat that KL",
    "declares": "declared budget", "held": "held",
}  # fmt: skip


def audit_all(specs: Sequence[str], q: Tensor, p: Tensor) -> list[dict[str, Any]]:
    print(rule("what every policy emits on those rows (exact, nothing sampled)"))
    records = [_audited(ct.policy(spec), q, p) for spec in specs]
    print(columns(records, AUDIT_HEADS) + "\n")
    return records


def _audited(policy: ct.Policy, q: Tensor, p: Tensor) -> dict[str, Any]:
    audit = ct.audit(policy, q, p)
    kl, budget = audit.divergences["kl"], policy.declares.budget
    return {
        "policy": policy.spec,
        "acceptance": float(audit.acceptance.mean()),
        "emitted_kl": float(kl.mean()),
        "largest_emitted_kl": float(kl.max()),
        "best_acceptance_at_that_kl": float(audit.optimum_acceptance.mean()),
        "least_kl_at_that_acceptance": float(np.nanmean(audit.optimum_divergence)),
        "declares": "no budget" if budget is None else str(budget),
        "held": None if audit.within is None else bool(audit.within.all()),
        "share_over_budget": None if audit.over_share is None else float(audit.over_share.mean()),
    }


COLUMNS = (
    "policy knob num_draft_tokens tuned tokens_per_second tokens_per_second_min "
    "tokens_per_second_max speedup accepted_per_call tokens_per_call tokens target_calls "
    "acceptance emitted_kl_per_token largest_row_kl verified_rows declares held "
    "share_over_budget largest_spent"
).split()
AUDITED_ROWS = 256  # rows audited at once: bounds memory at large vocabularies


def measure(
    harness: Harness, specs: Sequence[str], *, widths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each policy and K, plain target first; one untimed, metered run precedes."""
    lines = configs([PLAIN], specs, widths, [1])
    grid = Grid(lines, len(harness.prompts), repeats, seed=harness.seed)

    def decoded(job: Job) -> Record:
        metered = job.repeat == 0
        outcome = harness.decode(job.config, job.group, meter=metered, record_rows=metered)
        assert outcome.result is not None
        audits = _audits(job.config, outcome.result) if metered else []
        return outcome.record | {"audits": audits}

    runs = grid.runs(grid.fill(decoded))
    plain = float(np.median(runs[lines[0]].speeds))
    rows = [_row(line, line_runs, plain) for line, line_runs in runs.items()]
    rising = sorted(rows, key=lambda row: row["speedup"])
    fastest = {(row["policy"], row["knob"]): row["speedup"] for row in rising}
    for row in rows:
        row["tuned"] = row["speedup"] == fastest[row["policy"], row["knob"]]
    return rows


def _row(line: Config, runs: Runs, plain: float) -> dict[str, Any]:
    policy, knob = label(line.policy)
    median = float(np.median(runs.speeds))
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {
        "policy": policy,
        "knob": knob,
        "num_draft_tokens": line.num_draft_tokens,
        "tokens_per_second": median,
        "tokens_per_second_min": float(runs.speeds.min()),
        "tokens_per_second_max": float(runs.speeds.max()),
        "speedup": median / plain,
        "accepted_per_call": runs.ratio("accepted", "target_calls"),
        "tokens_per_call": runs.ratio("tokens", "target_calls"),
        "tokens": runs.total("tokens"),
        "target_calls": runs.total("target_calls"),
    }
    return row if line.policy == PLAIN else row | _cost(line, runs)


def _cost(line: Config, runs: Runs) -> dict[str, Any]:
    audits: list[Audit] = [audit for record in runs.metered for audit in record["audits"]]
    budget = ct.policy(line.policy).declares.budget
    row: dict[str, Any] = {
        "acceptance": _mean(audits, "acceptance"),
        "emitted_kl_per_token": runs.ratio("kl", "tokens"),
        "largest_row_kl": max(record["largest_row_kl"] for record in runs.metered),
        "verified_rows": runs.total("rows"),
        "declares": "no budget" if budget is None else str(budget),
    }
    if budget is not None:
        row["held"] = all(bool(audit.within.all()) for audit in audits)
        row["largest_spent"] = max(float(audit.spent.max()) for audit in audits)
        if budget.scope == "per proposal":
            row["share_over_budget"] = _mean(audits, "over_share")
    return row


def _audits(line: Config, result: GenerationResult) -> list[Audit]:
    parts = (result.rows[at:][:AUDITED_ROWS] for at in range(0, len(result.rows), AUDITED_ROWS))
    pairs = ([stacked(part, row) for row in ("q", "offers")] for part in parts)
    return [ct.audit(ct.policy(line.policy), *rows, normalise=True) for rows in pairs]


def _mean(audits: list[Audit], name: str) -> float:
    return float(torch.cat([getattr(audit, name) for audit in audits]).mean())
