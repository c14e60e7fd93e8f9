"""Acceptance against emitted KL on the rows of a real pair, for every policy and for the best.

Rows are logged along texts sampled from the target; each policy is then evaluated exactly on these
rows. The band at a constant price is the lower envelope: no policy that decides token by token has
less mean KL at the same mean acceptance (theorem in ``cactus_theory.optimum``).
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import cactus_theory as ct
from cactus_theory.commands.models import opened
from cactus_theory.emitted import proposal_divergence
from cactus_theory.policies import Policy

from ..common.inputs import add_pair_arguments
from ..common.results import publish
from ..common.statistics import hermite
from ..common.walk import log_rows

OUT = Path("paper_figures/data/acceptance_kl.csv")
# knobs from nearly lossless to strongly relaxed: budgets in nats, thresholds of typical acceptance
DELTAS = (0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
EPSILONS = (0.02, 0.05, 0.09, 0.2, 0.3, 0.5, 0.7, 0.9)
# prices in acceptance per nat, from nearly lossless to nearly h = p
PRICES = tuple(np.geomspace(50, 0.02, 48).tolist())
# series of the table → (policy, knob, values of the knob, other knobs)
SERIES: dict[str, tuple[str, str | None, tuple[float | None, ...], dict[str, str]]] = {
    "speculative": ("speculative", None, (None,), {}),
    "band_price": ("band", "price", PRICES, {}),
    "band_delta": ("band", "delta", DELTAS, {}),
    "cactus": ("cactus", "delta", DELTAS, {}),
    "cactus_exact": ("cactus_exact", "delta", DELTAS, {}),
    "typical": ("typical", "epsilon", EPSILONS, {}),
    "typical_target": ("typical", "epsilon", EPSILONS, {"recover": "target"}),
}
# relative distance outside the envelope that still counts as its end: rounding
SLACK = 1e-12
Rows = Float[Tensor, "rows vocab"]
PerPoint = Float[np.ndarray, "points"]
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_pair_arguments(parser)
    add("--tokens-each", type=int, default=12, help="tokens sampled after each prompt")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=OUT, help="the CSV")


def run(args: argparse.Namespace) -> int:
    pair, _, prompts = opened(args)
    q, p = log_rows(pair, prompts, args.tokens_each, args.seed)
    notes = {
        "rows": f"{len(q)} along text the target wrote after {len(prompts)} prompts, vocabulary "
        f"{q.shape[-1]}",
        "dtype": pair.dtype,
        "units": "nats; mean over rows; kl_ratio = mean_kl / frontier_kl at equal acceptance",
    }
    rows = table(q, p, Envelope.of(q, p, PRICES))
    publish(args, rows, **notes)
    for row in rows:
        if row["series"] == "cactus" and row["kl_ratio"]:
            text = "accepts {mean_acceptance:.4f} for {mean_kl:.4f} nats, {kl_ratio:.3f}x the least"
            print(f"cactus delta={row['value']:<6g}", text.format(**row))
    print(f"{len(rows)} policies on {len(q)} rows in {args.out}")
    return 0


def table(q: Rows, p: Rows, best: "Envelope") -> list[Row]:
    rows = []
    for series, (name, knob, values, fixed) in SERIES.items():
        for value in values:
            policy = ct.policy(name, **(fixed if knob is None else {knob: value, **fixed}))
            row: Row = {"series": series, "knob": knob, "value": value} | spending(policy, q, p)
            rows.append(row | best.compare(row["mean_acceptance"], row["mean_kl"]))
    return rows


def spending(policy: Policy, q: Rows, p: Rows) -> Row:
    """Return acceptance, KL(out‖q) in nats, and the share of proposals over their budget."""
    acceptance = (p * policy.acceptance_row(q, p)).sum(-1)
    kl = ct.divergence("kl").value(ct.emitted_law(policy, q, p), q)
    return {
        "mean_acceptance": acceptance.mean().item(),
        "mean_kl": kl.mean().clamp(min=0.0).item(),
        "max_kl": kl.max().clamp(min=0.0).item(),
        "over_share": over_share(policy, q, p),
    }


def over_share(policy: Policy, q: Rows, p: Rows) -> float | None:
    """Return the probability that the drafted token's row h⁽ⁿ⁾ exceeds the declared budget.

    None for a policy without a budget per proposal.
    """
    budget = policy.declares.budget
    if budget is None or budget.scope != "per proposal":
        return None
    costs = proposal_divergence(policy, q, p, ct.divergence(budget.divergence))
    return torch.where(budget.held(costs), 0.0, p).sum(-1).mean().item()


@dataclass(frozen=True)
class Envelope:
    """The best trade-off of mean acceptance and mean KL: bands at one price for all rows.

    The price is the slope dA/dKL of the envelope, so that cubic Hermite interpolation between the
    solved prices has exact derivatives.
    """

    price: PerPoint
    acceptance: PerPoint
    kl: PerPoint

    @classmethod
    def of(cls, q: Rows, p: Rows, prices: tuple[float, ...]) -> "Envelope":
        acceptances, costs = [], []
        for price in prices:
            best = ct.optimal_acceptance(q, p, price=price)
            acceptances.append(best.acceptance.mean().item())
            costs.append(best.divergence.mean().item())
        points = np.array([prices, acceptances, costs])
        # once h = p on every row, a lower price gives the same point
        rises = (np.diff(points[1:], prepend=-np.inf) > 0).all(0)
        return cls(*points[:, rises])

    def compare(self, acceptance: float, kl: float) -> Row:
        """Return the least KL at this acceptance and the best acceptance at this KL.

        The values are None outside the solved prices: nearly lossless, or nearly h = p.
        """
        log_kl = np.log(self.kl)
        slope, most = self.price * self.kl, None
        least = hermite(acceptance, self.acceptance, log_kl, 1 / slope, SLACK)
        if kl > 0:
            most = hermite(math.log(kl), log_kl, self.acceptance, slope, SLACK)
        return {
            "frontier_kl": None if least is None else math.exp(least),
            "kl_ratio": None if least is None else kl / math.exp(least),
            "frontier_acceptance": most,
        }
