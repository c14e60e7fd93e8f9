"""What is computed on the logged rows: one of them solved three ways, every policy on all."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.base.tables import rule, shown, text_table
from cactus_theory.decoding import Pair

# nats; the budget of the solved row
SOLVED_DELTA = 0.1
# a row worth drawing: lossless sampling refuses a fair share, and many tokens are in play
DRAWN_REJECTIONS = (0.3, 0.5)
# tokens below this in both rows are too small to see in the picture
DRAWN_MASS = 1e-4
PROGRAM_TOLERANCE = 1e-6
HEADS = ("", "acceptance", "price dA/dδ", "proof of optimality", "seconds")


def solve(q: Tensor, p: Tensor, pair: Pair) -> list[dict[str, Any]]:
    """Solve one of the rows (N, V), print the answers side by side, return its tokens."""
    from solvers import optimal

    print(rule(f"the optimal acceptance on one row, KL ≤ {SOLVED_DELTA} nats"))
    rejected = (q - p).clamp(min=0.0).sum(-1)
    row = row_to_draw(q, rejected)
    started = time.perf_counter()
    closed = ct.optimal_acceptance(q[row], p[row], delta=SOLVED_DELTA)
    elapsed = time.perf_counter() - started
    program = optimal.solve(q[row].numpy(), p[row].numpy(), divergence="kl", delta=SOLVED_DELTA)
    accepted = float(closed.acceptance)
    lines = [
        ("lossless", f"{1 - float(rejected[row]):.9f}", "", "", ""),
        (
            "closed form", f"{accepted:.9f}", f"{float(closed.price):.6f}",
            f"certificate gap {float(closed.gap):.1e}", f"{elapsed:.4f}",
        ),
        (
            f"cvxpy ({program.solver})", f"{program.acceptance:.9f}", f"{program.price:.6f}",
            f"dual gap {program.gap:.1e}", f"{program.seconds:.4f}",
        ),
    ]  # fmt: skip
    print(text_table(HEADS, lines))
    distance = abs(accepted - program.acceptance)
    agree = "agree" if distance <= PROGRAM_TOLERANCE else "DISAGREE"
    print(f"closed form and program {agree}: they differ by {distance:.1e}\n")
    return _records(q[row], p[row], closed, pair)


def row_to_draw(q: Tensor, rejected: Tensor) -> int:
    """Return the row of largest entropy among those with a fair share of rejections."""
    low, high = DRAWN_REJECTIONS
    entropy = -torch.xlogy(q, q).sum(-1)
    fair = (rejected >= low) & (rejected <= high)
    if not bool(fair.any()):
        return int(rejected.argmax())
    return int(torch.where(fair, entropy, -1.0).argmax())


def _records(
    q: Tensor, p: Tensor, closed: ct.OptimalAcceptance, pair: Pair
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
            "band": float(closed.target[token]),
            "cactus": float(emitted[token]),
            "lower": float(closed.lower),
            "upper": float(closed.upper),
            "delta": SOLVED_DELTA,
            "acceptance": float(closed.acceptance),
            "speculative": float(torch.minimum(q, p).sum()),
        }
        for token, below in zip(order[drawn], cumulative[drawn], strict=True)
    ]


AUDIT_HEADS = (
    "policy", "acceptance", "emitted\nKL", "largest", "best\nacceptance\nat that KL",
    "least KL\nat that\nacceptance", "declared budget", "held", "proposals\nover",
)  # fmt: skip


def audit_all(specs: Sequence[str], q: Tensor, p: Tensor) -> list[dict[str, Any]]:
    """Audit every policy on every row (N, V), print a table, return its lines."""
    print(rule("what every policy emits on those rows (exact, nothing sampled)"))
    records = [_audited(ct.policy(spec), q, p) for spec in specs]
    cells = [[shown(value) for value in record.values()] for record in records]
    print(text_table(AUDIT_HEADS, cells) + "\n")
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
