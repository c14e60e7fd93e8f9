"""What each policy gains and costs in a real decode: tokens a target call against emitted KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

SPACING = 0.045  # of the axis, between labels
LOSSLESS_AT = 1e-3  # where an emitted KL of zero is drawn on the logarithmic axis


def draw(data: Path) -> Figure:
    """Return the figure from ``policies.csv``: one panel per kind of gain."""
    rows = [row for row in style.read(data / "policies.csv") if row["policy"] != "plain"]
    widest = max(row["num_draft_tokens"] for row in rows)
    figure, (calls, speed) = style.panels(2, width=8.6, height=4.0)
    same = [row for row in rows if row["num_draft_tokens"] == widest]
    _panel(calls, same, "tokens_per_call", "tokens per target call")
    _panel(speed, [r for r in rows if r["tuned"] == "True"], "speedup", "speed-up over plain")
    speed.axhline(1, color=style.MUTED, lw=0.8, ls=":")
    calls.set_title(f"Tokens bought by divergence, K = {widest:g}")
    speed.set_title("Measured speed, each at its fastest K")
    return figure


def _panel(ax: Axes, rows: list[dict[str, Any]], key: str, name: str) -> None:
    heights = [row[key] for row in rows]
    margin = 0.08 * (max(heights) - min(heights) or 1.0)
    ax.set_ylim(min(heights) - margin, max(heights) + margin)
    _join(ax, rows, key)
    places = _apart(heights, SPACING * (max(heights) - min(heights) + 2 * margin))
    for row, place in zip(rows, places, strict=True):
        at = (max(row["emitted_kl_per_token"], LOSSLESS_AT), row[key])
        colour = style.COLOUR.get(_series(row), style.INK)
        ax.plot(*at, "o", ms=6, color=colour, mec="white", mew=0.8, zorder=3)
        ax.annotate(_name(row), at, (at[0] * 1.35, place), color=colour, fontsize=7, va="center")
    ax.set_xscale("log")
    largest = max(row["emitted_kl_per_token"] for row in rows)
    ax.set_xlim(LOSSLESS_AT * 0.8, largest * 14)
    values = (0.01, 0.1, 1.0)
    style.ticks(ax.xaxis, (LOSSLESS_AT, *values))
    ax.set_xticklabels(["0", *(f"{value:g}" for value in values)])
    ax.set_xlabel("emitted KL per token, nats")
    ax.set_ylabel(name)


def _apart(heights: list[float], least: float) -> list[float]:
    """Return label heights near ``heights``, at least ``least`` from each other."""
    places = list(heights)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for _ in range(50):
        for low, high in zip(order, order[1:], strict=False):
            short = least - (places[high] - places[low])
            if short > 0:
                places[low] -= short / 2
                places[high] += short / 2
    return places


def _name(row: dict[str, Any]) -> str:
    knob = str(row["knob"] or "").replace("delta=", "δ ").replace("price=", "price ")
    return f"{row['policy'].replace('_', ' ')} {knob}".strip()


def _join(ax: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """Join the points of one series."""
    for series in sorted({_series(row) for row in rows}):
        points = sorted((r["emitted_kl_per_token"], r[key]) for r in rows if _series(r) == series)
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, lw=1, alpha=0.5, color=style.COLOUR.get(series, style.INK))


def _series(row: dict[str, Any]) -> str:
    knob = str(row["knob"] or "").partition("=")[0]
    return f"{row['policy']}_{knob}" if row["policy"] == "band" else row["policy"]
