"""What each policy gains and costs in a real decode: tokens a target call against emitted KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

LOSSLESS_AT = 1e-3  # where an emitted KL of zero is drawn on the logarithmic axis


def draw(data: Path) -> Figure:
    """Return the figure from ``policies.csv``: one panel per kind of gain."""
    rows = [row for row in style.read(data / "policies.csv") if row["policy"] != "plain"]
    figure, (calls, speed) = style.panels(2, width=7.6, height=3.4)
    _panel(calls, rows, "tokens_per_call", "tokens per target call")
    _panel(speed, rows, "speedup", "speed-up over plain decoding")
    speed.axhline(1, color=style.MUTED, lw=0.8, ls=":")
    calls.set_title("Tokens bought by divergence")
    speed.set_title("Measured speed")
    return figure


def _panel(ax: Axes, rows: list[dict[str, Any]], key: str, name: str) -> None:
    for row in rows:
        at = (max(row["emitted_kl_per_token"], LOSSLESS_AT), row[key])
        series = _series(row)
        colour = style.COLOUR.get(series, style.INK)
        ax.plot(*at, "o", ms=6, color=colour, mec="white", mew=0.8, zorder=3)
        knob = str(row["knob"] or "").replace("delta=", "δ ").replace("price=", "price ")
        label = f"{row['policy'].replace('_', ' ')} {knob}".strip()
        style.label(ax, label, at, colour, shift=(5, 5), fontsize=7)
    _join(ax, rows, key)
    ax.set_xscale("log")
    largest = max(row["emitted_kl_per_token"] for row in rows)
    ax.set_xlim(LOSSLESS_AT * 0.8, largest * 8)
    values = (0.01, 0.1, 1.0)
    style.ticks(ax.xaxis, (LOSSLESS_AT, *values))
    ax.set_xticklabels(["0", *(f"{value:g}" for value in values)])
    ax.set_xlabel("emitted KL per token, nats")
    ax.set_ylabel(name)


def _join(ax: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """Join the points of one series."""
    for series in sorted({_series(row) for row in rows}):
        points = sorted((r["emitted_kl_per_token"], r[key]) for r in rows if _series(r) == series)
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, lw=1, alpha=0.5, color=style.COLOUR.get(series, style.INK))


def _series(row: dict[str, Any]) -> str:
    knob = str(row["knob"] or "").partition("=")[0]
    return f"{row['policy']}_{knob}" if row["policy"] == "band" else row["policy"]
