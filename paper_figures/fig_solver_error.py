"""The closed form against convex programs over the vocabulary, with what failed."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

PROGRAMS = {
    "ratios": (style.COLOUR["band_price"], "o", "the program in ratios to the row"),
    "plain": (style.COLOUR["cactus"], "s", "the program written plainly in h"),
}
# drawn above every error: no answer, or one that failed its own check
FAILED, TOP = 3e-2, 0.3
# a distance of exactly zero on the logarithmic axis
LEAST = 1e-13
APART = 1.12


def draw(data: Path) -> Figure:
    """Return the figure from ``solver_error.csv``: errors with failures, and seconds."""
    rows = style.read(data / "solver_error.csv")
    figure, (errors, seconds) = style.panels(2, height=3.5)
    for number, (name, (colour, marker, label)) in enumerate(PROGRAMS.items()):
        look = {"color": colour, "marker": marker, "ms": 4}
        solved = [row for row in rows if row["program"] == name]
        aside = APART ** (2 * number - 1)  # so that one does not cover the other
        _errors(errors, solved, aside, look | {"ls": ""}, label)
        _seconds(seconds, solved, "seconds", look)
    _seconds(seconds, rows, "closed_form_seconds", {"color": style.INK, "marker": "D", "ms": 4})
    largest = max(row["vocabulary"] for row in rows)
    end = largest, _median(rows, largest, "closed_form_seconds")
    style.label(seconds, "the closed form", end, style.INK, ha="right", shift=(0, -11))
    errors.axhline(FAILED, color=style.MUTED, lw=0.8, ls=":")
    style.label(errors, "no answer", (rows[0]["vocabulary"], FAILED), style.MUTED, shift=(-4, 7))
    errors.set(yscale="log", ylim=(LEAST / 3, TOP), ylabel="distance in acceptance")
    seconds.set(yscale="log", ylabel="seconds a row, median")
    errors.set_title("Where programs agree with it")
    seconds.set_title("What an answer takes")
    for axes in (errors, seconds):
        style.log_axis(axes.xaxis, sorted({row["vocabulary"] for row in rows})[::2], "vocabulary")
    style.legend_below(figure, errors)
    return figure


def _errors(axes: Axes, rows: list[Row], aside: float, look: dict[str, Any], label: str) -> None:
    sizes, distances = style.columns(rows, "vocabulary", "error")
    heights = [max(distance, LEAST) for distance in distances]
    axes.plot([size * aside for size in sizes], heights, label=label, **look)
    lost = [row["vocabulary"] * aside for row in rows if row["error"] is None]
    hollow: dict[str, Any] = look | {"mfc": "white"}
    axes.plot(lost, [FAILED] * len(lost), **hollow)


def _seconds(axes: Axes, rows: list[Row], key: str, look: dict[str, Any]) -> None:
    sizes = sorted({row["vocabulary"] for row in rows})
    axes.plot(sizes, [_median(rows, size, key) for size in sizes], lw=1.2, **look)


def _median(rows: list[Row], size: float, key: str) -> float:
    values = sorted(row[key] for row in rows if row["vocabulary"] == size)
    return values[len(values) // 2]
