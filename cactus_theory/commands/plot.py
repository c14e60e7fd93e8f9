"""Pictures of one row and of many: the band against p/q, frontiers with policies on them."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cactus_theory as ct
from cactus_theory.base.files import write_whole

# folder of the style and colours, which the project's figures read, too
BASE = Path(__file__).resolve().parent.parent / "base"
POLICIES, SETTINGS = BASE / "looks.csv", BASE / "look.mplstyle"


def _looks() -> dict[str, dict[str, Any]]:
    lines = POLICIES.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row["policy"]: {"color": row["colour"], "ls": row["line"], "marker": row["marker"]}
            for row in rows}  # fmt: skip


LOOKS = _looks()
COLOUR = {name: look["color"] for name, look in LOOKS.items()}
INK, MUTED, OPTIMUM = COLOUR["speculative"], COLOUR["other"], COLOUR["band_price"]
OWN, DRAFT = COLOUR["own"], COLOUR["draft"]


def settings() -> Any:
    """Return matplotlib's settings for a picture, whatever the user's are."""
    import matplotlib

    look = matplotlib.rc_params_from_file(SETTINGS, use_default_template=False)
    return {**matplotlib.rcParamsDefault, **look, "backend": "Agg"}


# metadata left out of each kind of file, so that equal rows give equal bytes
METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}
# points of a drawn frontier: enough for a line without corners
FRONTIER_POINTS = 65
# right end of a frontier that is drawn, over the largest mark on it
BEYOND = 1.5
# names whose colours the policies take in turn; the optimum has the blue
SHOWN = ("cactus", "typical", "band_block", "cactus_exact", "band_delta", "speculative")
COLOURS = [COLOUR[name] for name in SHOWN]
MARKERS = "osD^vP*X"
Point = tuple[str, float, float]
# least and largest ratio drawn; tokens beyond are nearly excluded by one of the two models
SHOWN_RATIOS = (1e-3, 1e3)


def save_plot(
    path: str,
    q: np.ndarray,
    p: np.ndarray,
    divergence: str,
    delta: float,
    policy: Any = None,
    title: str = "",
) -> None:
    """Draw the optimum for one row (V,) at ``delta``, and the policy: PNG, PDF or SVG.

    ``title`` says which row it is, of many.
    """
    q, p = (np.asarray(row, np.float64) / np.asarray(row, np.float64).sum() for row in (q, p))
    best = ct.optimal_acceptance(q, p, divergence=divergence, delta=delta)
    line = ct.frontier(q, p, divergence=divergence, points=FRONTIER_POINTS)
    points = [(f"optimum at {delta:.4g}", float(best.divergence), float(best.acceptance))]
    if policy is not None:
        points.append((policy.spec, *_point(policy, q, p, divergence)))

    def draw(figure: Any) -> None:
        band, curve = figure.subplots(1, 2)
        _draw_band(band, q, p, best, policy)
        _draw_frontier(curve, line, divergence, points)
        figure.suptitle(title)

    _save(path, (7.2, 3.5), draw)


def save_pooled_plot(path: str, line: Any, divergence: str, points: Sequence[Point]) -> None:
    """Draw a pooled frontier with policies (name, mean divergence, mean acceptance).

    The points of a line with corners are marked: nothing is known between them.
    """
    _save(path, (6.4, 4.2), lambda figure: _draw_frontier(
        figure.subplots(), line, divergence, points, "mean "
    ))  # fmt: skip


def _save(path: str, inches: tuple[float, float], draw: Callable[[Any], None]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(settings()):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        write_picture(path, figure)


def write_picture(path: str, figure: Any) -> None:
    """Write a figure, all of it or nothing; equal figures give equal bytes."""
    suffix, content = Path(path).suffix, io.BytesIO()
    figure.savefig(content, format=suffix[1:], dpi=200, metadata=METADATA[suffix])
    write_whole(path, content.getvalue())


def _draw_band(axes: Any, q: np.ndarray, p: np.ndarray, best: Any, policy: Any) -> None:
    """Draw ratios to q over the target mass to the left, tokens in order of p/q."""
    inside = q > 0
    order = np.argsort(p[inside] / q[inside], kind="stable")
    mass = q[inside][order]
    edges = np.concatenate([[0.0], mass.cumsum()])
    rows = [("draft p/q", p, DRAFT, 4.0), ("the optimum", best.target, OPTIMUM, 2.0)]
    if policy is not None:
        rows.append((f"{policy.spec} emits", ct.emitted_law(policy, q, p), OWN, 1.3))
    for label, row, colour, width in rows:
        ratio = (row[inside][order] / mass).clip(*SHOWN_RATIOS)
        axes.stairs(ratio, edges, color=colour, linewidth=width, label=label, baseline=None)
    lower, upper = float(best.lower), float(best.upper)
    low, high = max(lower, SHOWN_RATIOS[0]), min(upper, SHOWN_RATIOS[1])
    axes.axhspan(low, high, color=OPTIMUM, alpha=0.09, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlim(0, 1)
    axes.set_xlabel("tokens in order of p/q, as wide as q")
    axes.set_ylabel("probability relative to the target")
    axes.set_title(f"Optimum: p within {lower:.3g} q … {upper:.3g} q")
    axes.legend(frameon=False, fontsize=7.5)


def _draw_frontier(
    axes: Any, line: Any, divergence: str, points: Sequence[Point], of_rows: str = ""
) -> None:
    """Draw acceptance against the divergence of what is emitted, of one row or the mean."""
    delta, accepted = (np.asarray(column, np.float64) for column in (line.delta, line.acceptance))
    finite = np.isfinite(delta)
    corners: Any = {"marker": "o" if finite.sum() < FRONTIER_POINTS else "", "ms": 3}
    label = "optimum over all rows" if of_rows else "optimum"
    axes.plot(delta[finite], accepted[finite], color=OPTIMUM, label=label, **corners)
    axes.plot(0, accepted[0], "s", color=INK, label="lossless")
    drawn = [point for point in points if math.isfinite(point[1])]
    for number, (name, spent, acceptance) in enumerate(drawn):
        marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
        axes.plot(spent, acceptance, linestyle="none", label=name, marker=marker, color=colour)
    unit = " (nats)" if divergence in ("kl", "reverse_kl") else ""
    axes.set_xlabel(f"{of_rows}{divergence} of what is emitted, from the target{unit}")
    axes.set_ylabel(f"{of_rows}acceptance")
    _frame(axes, [spent for _, spent, _ in drawn])


def _frame(axes: Any, marks: Sequence[float]) -> None:
    """Show the divergences from 0 to beyond the marks, and list only what is drawn there."""
    most = max(marks, default=0.0)
    right = BEYOND * most or math.inf  # all of the frontier where every mark is at 0
    points = {line: np.array(line.get_data(), dtype=float) for line in axes.get_lines()}
    shown = {line: xy[:, xy[0] <= right] for line, xy in points.items() if (xy[0] <= right).any()}
    if right < math.inf:
        heights = np.concatenate([xy[1] for xy in shown.values()])
        pad = 0.05 * float(np.ptp(heights)) or 0.01
        axes.set_xlim(-0.03 * right, right)
        axes.set_ylim(heights.min() - pad, heights.max() + pad)
    listed = [line for line in shown if not line.get_label().startswith("_")]
    axes.legend(handles=listed, frameon=False, fontsize=7.5, loc="best")


def _point(policy: Any, q: np.ndarray, p: np.ndarray, divergence: str) -> tuple[float, float]:
    law = torch.from_numpy(np.asarray(ct.emitted_law(policy, q, p)))
    spent = ct.divergence(divergence).value(law, torch.from_numpy(q)).item()
    phi = policy.acceptance_row(torch.from_numpy(q), torch.from_numpy(p)).numpy()
    return spent, float((p * phi).sum())
