"""The picture of one row: the band against p/q, and the frontier with policies on it."""

import io
import math
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory import _arguments as check
from cactus_theory._files import write_whole

# Steps of a knob that show a policy's own trade-off beside the frontier.
COMPARED = {
    "Cactus": [f"cactus:delta={delta}" for delta in (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)],
    "typical": [f"typical:epsilon={epsilon}" for epsilon in (0.5, 0.2, 0.09, 0.04, 0.01)],
}
COLOURS = {"Cactus": "#D55E00", "typical": "#009E73"}
OPTIMUM, DRAFT, INK = "#0072B2", "#bdbdbd", "#222222"
# enough for a line without corners
FRONTIER_POINTS = 65
# Ratios are drawn between these; tokens beyond are nearly excluded by one of the two models.
SHOWN_RATIOS = (1e-3, 1e3)


def save_plot(
    path: str, q: np.ndarray, p: np.ndarray, divergence: str, delta: float, rule: Any = None
) -> None:
    """Draw the optimum for one row (V,) at ``delta``, with the policy ``rule`` if given, as PNG.

    Raises
    ------
    ValueError, OSError
        Another suffix than .png; a file that cannot be written.
    ModuleNotFoundError
        Without matplotlib (extra ``figures``).
    """
    if not path.endswith(".png"):
        raise ValueError(f"--plot: must end in .png; got {path!r}")
    check.optional_module("matplotlib", "figures")
    from matplotlib.figure import Figure

    q, p = (np.asarray(row, np.float64) / np.asarray(row, np.float64).sum() for row in (q, p))
    best = ct.optimal_acceptance(q, p, divergence=divergence, delta=delta)
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    band, curve = figure.subplots(1, 2)
    for ax in (band, curve):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#e8e8e8", linewidth=0.6)
        ax.set_axisbelow(True)
    _draw_band(band, q, p, best, rule)
    _draw_frontier(curve, q, p, best, divergence, rule)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=160, metadata={"Software": None})
    write_whole(path, content.getvalue())


def _draw_band(ax: Any, q: np.ndarray, p: np.ndarray, best: Any, rule: Any) -> None:
    """Draw ratios to q over the target mass to the left, tokens in order of p/q."""
    inside = q > 0
    order = np.argsort(p[inside] / q[inside], kind="stable")
    mass = q[inside][order]
    edges = np.concatenate([[0.0], mass.cumsum()])
    rows = [("draft p/q", p, DRAFT, 4.0), ("the optimum", best.target, OPTIMUM, 2.0)]
    if rule is not None:
        rows.append((f"{rule.spec} emits", ct.emitted_law(rule, q, p), COLOURS["Cactus"], 1.3))
    for label, row, colour, width in rows:
        ratio = (row[inside][order] / mass).clip(*SHOWN_RATIOS)
        ax.stairs(ratio, edges, color=colour, linewidth=width, label=label, baseline=None)
    lower, upper = float(best.lower), float(best.upper)
    low, high = max(lower, SHOWN_RATIOS[0]), min(upper, SHOWN_RATIOS[1])
    ax.axhspan(low, high, color=OPTIMUM, alpha=0.09, linewidth=0)
    ax.set_yscale("log")
    ax.set_xlim(0, 1)
    ax.set_xlabel("tokens in order of p/q, each as wide as its target probability")
    ax.set_ylabel("probability relative to the target")
    ax.set_title(
        f"the optimum clips p to between {lower:.3g} q and {upper:.3g} q", fontsize=9.5, loc="left"
    )
    ax.legend(frameon=False, fontsize=8)


def _draw_frontier(
    ax: Any, q: np.ndarray, p: np.ndarray, best: Any, divergence: str, rule: Any
) -> None:
    """Draw acceptance against the divergence of what is emitted."""
    line = ct.frontier(q, p, divergence=divergence, points=FRONTIER_POINTS)
    shown = np.isfinite(line.delta)
    ax.plot(line.delta[shown], line.acceptance[shown], color=OPTIMUM, label="optimum")
    for label, specs in COMPARED.items():
        points = [_point(ct.policy(spec), q, p, divergence) for spec in specs]
        finite = [point for point in points if math.isfinite(point[0])]
        spent, kept = np.array(finite).reshape(-1, 2).T
        ax.plot(spent, kept, "o-", ms=3.5, lw=0.9, color=COLOURS[label], label=label)
    ax.plot(0, float(line.acceptance[0]), "s", ms=6, color=INK, label="speculative")
    ax.plot(float(best.divergence), float(best.acceptance), "o", ms=8, color=OPTIMUM)
    if rule is not None:
        spent, kept = _point(rule, q, p, divergence)
        ax.plot(spent, kept, "*", ms=13, color=COLOURS["Cactus"], mec=INK, label=rule.spec)
    unit = " (nats)" if divergence in ("kl", "reverse_kl") else ""
    ax.set_xlabel(f"{divergence} of what is emitted, from the target{unit}")
    ax.set_ylabel("acceptance")
    ax.set_title(
        f"optimum: {float(best.acceptance):.4g} accepted at {float(best.divergence):.4g}",
        fontsize=9.5,
        loc="left",
    )
    ax.legend(frameon=False, fontsize=8, loc="best")


def _point(rule: Any, q: np.ndarray, p: np.ndarray, divergence: str) -> tuple[float, float]:
    """Return the divergence that a policy spends on the row, and its acceptance."""
    law = torch.from_numpy(np.asarray(ct.emitted_law(rule, q, p)))
    spent = ct.divergence(divergence).value(law, torch.from_numpy(q)).item()
    kept = rule.keep(torch.from_numpy(q), torch.from_numpy(p)).numpy()
    return spent, float((p * kept).sum())
