r"""Excess of Cactus over its KL budget, per proposal and in the emitted law.

Per proposal, the published formula :math:`γ = \min(1, q_n + \sqrt{2δ q_n(1−q_n)})` spends
:math:`\mathrm{KL}(h^{(n)}\|q)`. This is at most ln(1 + 2δ), at q_n = 1/(1 + 2δ), which exceeds δ
for δ up to 1.2564. The budget does not bound the KL of the emitted law: two pairs of rows show
this for the published formula and for the exact root.
"""

import argparse
import math
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import cactus_theory as ct
from cactus_theory.emitted import proposal_divergence

from ..common.results import publish

POLICIES = ("cactus", "cactus_exact")
OUT = Path("paper_figures/data/overspend.csv")
# budgets in nats on both sides of 1.2564, where the published formula stops exceeding its budget
DELTAS = (0.01, 0.1, 0.5, 1.0, 2.0)
# range of the budgets for the emitted law, in nats, log-spaced with POINTS points
SPAN = (1e-3, 3.0)
POINTS = 121
Row = dict[str, str | float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points", type=int, default=POINTS, help="of q_n, and of delta at the right"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    rows = table(args.points)
    publish(args, rows)
    for row in rows:
        if row["kind"] == "maximum":
            text = "delta {delta:<5g} spends {kl_over_delta:.3f} budgets at q_n = {q_n:.4f}"
            print(text.format(**row))
    print(f"{len(rows)} rows in {args.out}")
    return 0


def table(points: int) -> list[Row]:
    """Return the rows: curves over q_n, their maxima, and KL over δ of emitted laws."""
    if points < 2:
        raise ValueError(f"points: must be at least 2; got {points!r}")
    rows = [row for name in POLICIES for delta in DELTAS for row in curve(name, delta, points)]
    rows += [maximum(delta) for delta in DELTAS]
    low, high = (math.log10(end) for end in SPAN)
    budgets = torch.logspace(low, high, points, dtype=torch.float64)
    for example, (q, p) in counterexamples().items():
        rows += [emitted(name, d, example, q, p) for name in POLICIES for d in budgets.tolist()]
    return rows


def proposal_kl(name: str, delta: float, q_n: Float[Tensor, "points"]) -> Float[Tensor, "points"]:
    """Return KL(h⁽ⁿ⁾‖q) in nats, from two points: n, and all other tokens together."""
    policy = ct.policy(name, delta=delta)
    pairs = torch.stack([q_n, 1 - q_n], -1)
    return proposal_divergence(policy, pairs, pairs, ct.divergence("kl"))[:, 0]


def curve(name: str, delta: float, points: int) -> list[Row]:
    """Return KL over δ on a grid of q_n, dense at both ends, with the kink at 1/(1 + 2δ)."""
    angle = torch.linspace(0, math.pi, points + 2, dtype=torch.float64)[1:-1]
    kink = torch.tensor([1 / (1 + 2 * delta)], dtype=torch.float64)
    q_n = torch.cat([(1 - angle.cos()) / 2, kink]).unique()
    costs = proposal_kl(name, delta, q_n)
    return [
        _row("curve", name, delta, cost, q_n=at)
        for at, cost in zip(q_n.tolist(), costs.tolist(), strict=True)
    ]


def maximum(delta: float) -> Row:
    """Return the largest KL of the published formula, ln(1 + 2δ) at q_n = 1/(1 + 2δ)."""
    return _row("maximum", "cactus", delta, math.log1p(2 * delta), q_n=1 / (1 + 2 * delta))


def counterexamples() -> dict[str, tuple[Tensor, Tensor]]:
    """Return target and draft rows (V,) for which the KL of the emitted law exceeds the budget."""
    few = torch.zeros(1000, dtype=torch.float64)
    few[:25] = 1 / 25
    return {
        "3 tokens": (
            torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64),
            torch.tensor([0.45, 0.45, 0.1], dtype=torch.float64),
        ),
        "25 of 1000 tokens": (torch.full((1000,), 1e-3, dtype=torch.float64), few),
    }


def emitted(name: str, delta: float, example: str, q: Tensor, p: Tensor) -> Row:
    law = ct.emitted_law(ct.policy(name, delta=delta), q, p)
    cost = ct.divergence("kl").value(law[None], q[None]).item()
    return _row("emitted", name, delta, cost, example=example)


def _row(kind: str, name: str, delta: float, kl: float, **place: float | str) -> Row:
    row: Row = {"kind": kind, "policy": name, "delta": delta, "q_n": None, "example": None}
    return row | place | {"kl": kl, "kl_over_delta": kl / delta}
