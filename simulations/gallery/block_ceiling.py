"""How far are policies from the best that any verifier of one drafted path can do?

On a tree of three tokens and four drafted ones the optimum over all verifiers is a convex
program, proven within 1e-6. Each policy's knob is set to spend the same; the rest is a gap.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

import cactus_theory as ct
from solvers.paths import random_tree

from ..block_gap import measure as measured_gaps
from . import BUDGETED, CACTUS, INK, OPTIMUM, SOFT

BUDGETS = (0.005, 0.02, 0.05, 0.1)
QUICK_BUDGETS = (0.02,)
# verifier, policy at any knob (it is set for the budget), colour, line
CASES = {
    "Cactus, token by token": ("chain", "cactus:delta=0.1", CACTUS, "^-."),
    "band, token by token": ("chain", "band:price=1", OPTIMUM, "o-"),
    "band, whole path": ("block", "band:price=1", BUDGETED, "s--"),
    "soft band, whole path": ("block", "soft_band:price=1", SOFT, "D-"),
}


@dataclass(frozen=True)
class Result:
    """Budgets (B,), and tokens per call (B,) of the optimum and of each policy."""

    budgets: np.ndarray
    optimum: np.ndarray
    tokens: dict[str, np.ndarray]


def measure(quick: bool = False) -> Result:
    """Return tokens per target call at equal metered KL per token."""
    tree = random_tree(3, 3 if quick else 4, seed=1)
    budgets = QUICK_BUDGETS if quick else BUDGETS
    tokens: dict[str, list[float]] = {name: [] for name in CASES}
    optimum = []
    for budget in budgets:
        for name, (verifier, spec, *_) in CASES.items():
            (row,) = measured_gaps(tree, [(verifier, ct.policy(spec))], per_token=budget)
            tokens[name].append(row["tokens_per_call"])
        optimum.append(row["optimal_tokens_per_call"])
    curves = {name: np.array(values) for name, values in tokens.items()}
    return Result(np.array(budgets), np.array(optimum), curves)


def say(result: Result) -> str:
    lines = ["below the optimum of all verifiers, in percent, at so many nats a token:"]
    lines.append(f"{'':24}" + "".join(f"{budget:8.3f}" for budget in result.budgets))
    for name in CASES:
        lines.append(f"{name:24}" + "".join(f"{gap:8.2f}" for gap in gaps(result, name)))
    return "\n".join(lines)


def gaps(result: Result, name: str) -> np.ndarray:
    """Return by how much a policy falls short of the optimum, in percent of it."""
    return 100 * (1 - result.tokens[name] / result.optimum)


def draw(figure: Any, result: Result) -> None:
    """Draw tokens per call under the ceiling, and what is left to gain."""
    left, right = figure.subplots(1, 2)
    left.plot(result.budgets, result.optimum, color=INK, lw=2, label="optimum of all verifiers")
    for name, (_, _, colour, style) in CASES.items():
        left.plot(result.budgets, result.tokens[name], style, color=colour, ms=3.6, label=name)
        right.plot(result.budgets, gaps(result, name), style, color=colour, ms=3.6)
    left.set_ylabel("tokens per target call")
    left.set_title("Under the ceiling")
    left.legend(frameon=False, fontsize=7.5)
    right.set_ylabel("below the optimum (%)")
    right.set_title("What is left to gain")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("metered KL (nats a token)")
