"""What every policy emits on logged rows, exactly: nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

import cactus_theory as ct

from ..common.terminal import rule, shown, text_table

HEADS = (
    "policy", "acceptance", "emitted\nKL", "largest", "best\nacceptance\nat that KL",
    "least KL\nat that\nacceptance", "declared budget", "held", "proposals\nover",
)  # fmt: skip


def audit_all(specs: Sequence[str], q: Tensor, p: Tensor) -> list[dict[str, Any]]:
    """Audit every policy on every row (N, V), print a table, return its lines."""
    print(rule("what every policy emits on those rows (exact, nothing sampled)"))
    records = [_audited(ct.policy(spec), q, p) for spec in specs]
    print(text_table(HEADS, [[shown(v) for v in record.values()] for record in records]) + "\n")
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
