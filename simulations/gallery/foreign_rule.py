"""A rule that somebody else wrote, and claims that sound right: which of them hold?

The kit looks for the smallest rows that break a claim; the audit says how often the claim is
broken on rows of a real pair. The rule is in ``agreement.py``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cactus_theory as ct
from cactus_theory.testing import Report, load_rule
from cactus_theory.testing._check import check_file

from . import DRAFT, INK, OPTIMUM, OWN, bars, real_rows

RULE = Path(__file__).with_name("agreement.py")
CLAIM = 0.1  # nats, as the rule declares
EXAMPLES = 300  # pairs of rows that the kit tries
ROWS = 48  # of the pair; the rule is called once for each of their 2,048 tokens


@dataclass(frozen=True)
class Result:
    """The kit's report, and what the rule and the best policy do on rows of the pair (R,)."""

    report: Report
    emitted_kl: Tensor
    acceptance: Tensor
    best_acceptance: Tensor


def measure(quick: bool = False) -> Result:
    """Return what the kit and the audit say."""
    source = f"{RULE}:agreement"
    report = check_file(source, examples=EXAMPLES, properties=["budget_holds"])
    q, p = real_rows(2 if quick else ROWS)
    audit = ct.audit(load_rule(source), q, p)
    best = ct.optimal_acceptance(q, p, delta=CLAIM).acceptance
    return Result(report, audit.divergences["kl"], audit.acceptance, best)


def say(result: Result) -> str:
    over = (result.emitted_kl > CLAIM).double().mean()
    broken = result.report.findings[0]
    return (
        f"claimed: {broken.expected} nats of emitted KL; found {broken.found} on\n"
        f"  q = {broken.target}, p = {broken.draft}\n"
        f"on {len(result.emitted_kl)} rows of the pair it exceeds the claim on {over:.0%}, at most "
        f"{result.emitted_kl.max():.2f} nats;\nit accepts {result.acceptance.mean():.3f}, the best "
        f"policy that keeps the claim {result.best_acceptance.mean():.3f}"
    )


def draw(figure: Any, result: Result) -> None:
    """Draw the counterexample, and the emitted KL on real rows."""
    left, right = figure.subplots(1, 2)
    broken = result.report.findings[0]
    names = [f"token {n}" for n in range(len(broken.target))]
    rows = {
        "target": (broken.target, INK),
        "draft": (broken.draft, DRAFT),
        "emitted": (broken.emitted, OWN),
    }
    bars(left, rows, names)
    left.set_title(f"Claimed: 0.1 nats. Here: {float(broken.found):.2f}")
    left.legend(frameon=False, fontsize=7.5)
    kl = result.emitted_kl.sort().values
    right.plot(torch.linspace(0, 1, len(kl)), kl, color=OWN)
    right.axhline(CLAIM, color=OPTIMUM, ls=":", label="what it claims")
    right.set_xlabel("share of the pair's rows")
    right.set_ylabel("emitted KL (nats)")
    right.set_title("On the rows of a real pair")
    right.legend(frameon=False, fontsize=7.5)
