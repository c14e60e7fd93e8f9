"""What each policy accepts for the KL it emits, and what it pays above the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style

# drawn from back to front
LINES = ("typical_target", "typical", "cactus_exact", "cactus", "band_delta", "band_price")
# the budget at which Cactus and the best are compared in the left panel
SHOWN_DELTA = 0.01
# the right panel ends here; typical acceptance pays far more
TOP = 2.9
Series = dict[str, list[dict[str, Any]]]
Columns = tuple[list[float], list[float]]


def draw(data: Path) -> Figure:
    """Return the figure from ``acceptance_kl.csv``."""
    series: Series = {}
    for row in style.read(data / "acceptance_kl.csv"):
        series.setdefault(row["series"], []).append(row)
    figure, (left, right) = style.panels(2, height=3.5)
    trade_off(left, series)
    overpaid(right, series)
    return figure


def trade_off(ax: Axes, series: Series) -> None:
    """Draw mean acceptance over mean emitted KL."""
    ax.set_title("Acceptance bought by emitted KL")
    ax.set(xlabel="mean KL(emitted ‖ target) per token, nats", ylabel="mean acceptance")
    ax.set(xscale="log", xlim=(2.5e-3, 2))
    style.ticks(ax.xaxis, (0.003, 0.01, 0.03, 0.1, 0.3, 1))
    floor = series["speculative"][0]["mean_acceptance"]
    ax.axhline(floor, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    text = "lossless: KL = 0"
    style.label(ax, text, (2.5e-3, floor), style.INK, shift=(3, -7))
    drawn = {name: plot(ax, name, series, "mean_kl", "mean_acceptance") for name in LINES}
    compare(ax, *[row for row in series["cactus"] if row["value"] == SHOWN_DELTA])
    best = [point for point in zip(*drawn["band_price"], strict=True) if point[0] < 0.09]
    name_line(ax, "band_price", best[-1], ha="right", shift=(-8, 6))
    name_line(ax, "typical", drawn["typical"], index=0, shift=(7, 2))
    last = drawn["typical_target"][0][-1], drawn["typical_target"][1][-1]
    style.label(ax, "recovering\nfrom q", last, style.COLOUR["typical"], ha="right", shift=(-6, 4))


def compare(ax: Axes, row: dict[str, Any]) -> None:
    """Mark how much less KL the best needs for the acceptance of one Cactus point."""
    best, own = row["frontier_kl"], row["mean_kl"]
    height = row["mean_acceptance"]
    ax.plot([best, own], [height, height], color=style.INK, linewidth=1.1, zorder=7)
    ax.plot([best, own], [height, height], "|", color=style.INK, markersize=6, zorder=7)
    text = f"{row['kl_ratio']:.2f}× the least KL"
    arrow = {"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.6, "shrinkB": 1}
    middle = ((best * own) ** 0.5, height)
    place = {"xytext": (-38, 33), "textcoords": "offset points", "ha": "center", "va": "center"}
    ax.annotate(text, middle, arrowprops=arrow, fontsize=8, color=style.INK, **place)


def overpaid(ax: Axes, series: Series) -> None:
    """Draw the KL in units of the least KL at equal acceptance."""
    ax.set_title("KL overpaid at equal acceptance")
    ax.set(xlabel="mean acceptance", ylabel="mean KL, relative to the least possible")
    ax.set(yscale="log", ylim=(0.9, TOP))
    style.ticks(ax.yaxis, (1, 1.2, 1.5, 2, 2.5), "×")
    drawn = {name: plot(ax, name, series, "mean_acceptance", "kl_ratio") for name in LINES}
    name_line(ax, "cactus_exact", drawn["cactus_exact"], index=0, shift=(-10, 9))
    name_line(ax, "cactus", drawn["cactus"], index=0, ha="right", shift=(-6, 0))
    name_line(ax, "band_delta", drawn["band_delta"], index=0, ha="left", shift=(-6, 9))
    end = (drawn["band_price"][0][0], 1.0)
    style.label(
        ax, "band, constant price: the best", end, style.COLOUR["band_price"], shift=(0, -7)
    )
    x, y = style.columns(
        series["typical"] + series["typical_target"], "mean_acceptance", "kl_ratio"
    )
    if y and min(y) > TOP:
        text, at = f"typical: off the scale,\n{min(y):.0f}× and more", (max(x), TOP)
        style.label(ax, text, at, style.COLOUR["typical"], ha="left", shift=(6, -12))


def plot(ax: Axes, name: str, series: Series, x: str, y: str) -> Columns:
    """Draw one policy over its knob and return its points."""
    points = style.columns(series[name], x, y)
    best = name == "band_price"
    options = style.look(name).options(3.4)
    if best:  # a line without points: the knob is drawn densely
        options |= {"marker": "", "lw": 2.2}
    ax.plot(*points, **{"lw": 1.3, "zorder": 5 if best else 3} | options)
    return points[0], points[1]


def name_line(ax: Axes, name: str, at: Any, index: int | None = None, **options: Any) -> None:
    """Write a policy's name in its colour at a point, or at point ``index`` of its line."""
    point = at if index is None else (at[0][index], at[1][index])
    style.label(ax, style.NAME[name], point, style.COLOUR[name], **options)
