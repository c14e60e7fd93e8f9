"""Every registered policy on rows of a real pair, against the frontier that none can pass.

Acceptance and emitted KL are exact means over the rows. The frontier shares one budget among
all rows at a constant price; the band lies on it, whatever its price.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

import cactus_theory as ct
from cactus_theory.policies import Policy

from ..block_gap import registered
from . import INK, MUTED, OPTIMUM, real_rows

# values of a knob, by its name; those outside a policy's range are left out
VALUES = {
    "delta": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "price": (8.0, 4.0, 2.0, 1.0, 0.5, 0.25),
    "k": (1, 2, 4, 8, 16),
}
OTHERS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
LARGEST_KL = 0.6  # nats a row that are drawn
MARKERS = "osD^v<>pP*Xh"


@dataclass(frozen=True)
class Result:
    """The frontier (points, 2), and by policy and knob its own points: (emitted KL, acceptance)."""

    frontier: np.ndarray
    points: dict[str, np.ndarray]


def measure(quick: bool = False) -> Result:
    """Return where every policy lies, and the frontier."""
    q, p = real_rows(12 if quick else None)
    line = ct.pooled_frontier(q, p, points=257)
    curve = np.stack([np.asarray(line.delta), np.asarray(line.acceptance)], -1)
    points: dict[str, list[tuple[float, float]]] = {}
    firsts = {policy.name + (policy.knob or policy.spec): policy for policy in registered("chain")}
    for first in firsts.values():
        name = first.name if first.knob is None else f"{first.name}:{first.knob}"
        family = _at_knobs(first, quick)
        points.setdefault(name, []).extend(_point(policy, q, p) for policy in family)
    return Result(curve, {name: np.array(pairs) for name, pairs in points.items()})


def _at_knobs(policy: Policy, quick: bool) -> Iterator[Policy]:
    """Yield the policy at the values of its knob that it takes; itself if it is tuned by none."""
    if policy.knob is None:
        yield policy
        return
    values = VALUES.get(policy.knob, OTHERS)
    for value in values[::3] if quick else values:
        try:
            yield ct.policy(policy, **{policy.knob: value})
        except ValueError:  # outside its range
            continue


def _point(policy: Policy, q: Tensor, p: Tensor) -> tuple[float, float]:
    kl = ct.divergence("kl").value(policy.emitted(q, p), q)
    return float(kl.mean()), float((p * policy.keep(q, p)).sum(-1).mean())


def highest(result: Result, kl: np.ndarray) -> np.ndarray:
    """Return the acceptance of the frontier at a mean emitted KL, between its points."""
    return np.interp(kl, *result.frontier.T)


def say(result: Result) -> str:
    """Return who comes closest to the frontier, in a few lines."""
    lines = []
    for name, points in result.points.items():
        inside = points[(points[:, 0] > 1e-3) & (points[:, 0] < LARGEST_KL)]
        if len(inside):
            short = 1 - inside[:, 1] / highest(result, inside[:, 0])
            lines.append((short.min(), f"  {name:22} {abs(short.min()):6.1%} to {short.max():.1%}"))
    head = f"below the frontier, between 0.001 and {LARGEST_KL} nats:"
    return "\n".join([head, *(text for _, text in sorted(lines))])


def draw(figure: Any, result: Result) -> None:
    """Draw the frontier and every policy beside its name."""
    import matplotlib

    figure.set_size_inches(7.2, 4.3)
    axes = figure.subplots()
    line = result.frontier[result.frontier[:, 0] <= LARGEST_KL]
    axes.fill_between(line[:, 0], line[:, 1], 1, color=MUTED, alpha=0.12, lw=0)
    axes.plot(*line.T, color=INK, lw=2, label="the frontier")
    axes.annotate("no policy reaches this", (0.02, 0.97), color=MUTED, va="top")
    colours = matplotlib.colormaps["tab20"](range(20))
    for number, (name, points) in enumerate(result.points.items()):
        inside = points[points[:, 0] <= LARGEST_KL]
        if len(inside):
            colour = OPTIMUM if name.startswith("band") else colours[number % 20]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(*inside.T, marker=marker, color=colour, lw=0.8, ms=4, label=name)
    axes.set(xlim=(-0.01, LARGEST_KL), ylim=(None, 1))
    axes.set_xlabel("mean emitted KL (nats a row)")
    axes.set_ylabel("mean acceptance")
    axes.set_title("Every policy, on rows of a real pair")
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
