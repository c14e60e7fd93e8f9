"""The closed form against convex programs over the vocabulary, with what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

Row = dict[str, Any]
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
        own = [row for row in rows if row["program"] == name]
        aside = APART ** (2 * number - 1)  # so that one does not cover the other
        _errors(errors, own, aside, {"color": colour, "marker": marker, "ms": 4, "ls": ""}, label)
        _seconds(seconds, own, "seconds", {"color": colour, "marker": marker, "ms": 4})
    _seconds(seconds, rows, "closed_form_seconds", {"color": style.INK, "marker": "D", "ms": 4})
    style.label(seconds, "the closed form", _last(rows), style.INK, ha="right", shift=(0, -11))
    errors.axhline(FAILED, color=style.MUTED, lw=0.8, ls=":")
    style.label(errors, "no answer", (rows[0]["vocabulary"], FAILED), style.MUTED, shift=(-4, 7))
    errors.set(yscale="log", ylim=(LEAST / 3, TOP), ylabel="distance in acceptance")
    seconds.set(yscale="log", ylabel="seconds a row, median")
    errors.set_title("Where programs agree with it")
    seconds.set_title("What an answer takes")
    for ax in (errors, seconds):
        ax.set_xscale("log")
        style.ticks(ax.xaxis, sorted({row["vocabulary"] for row in rows})[::2])
        ax.set_xlabel("vocabulary")
    handles, labels = errors.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7.5,
                  ncols=1 if style.narrow() else 2)  # fmt: skip
    return figure


def _errors(ax: Axes, rows: list[Row], aside: float, look: dict[str, Any], label: str) -> None:
    found = [row for row in rows if row["error"] is not None]
    xs = [row["vocabulary"] * aside for row in found]
    ax.plot(xs, [max(row["error"], LEAST) for row in found], label=label, **look)
    lost = [row["vocabulary"] * aside for row in rows if row["error"] is None]
    hollow: dict[str, Any] = look | {"mfc": "white"}
    ax.plot(lost, [FAILED] * len(lost), **hollow)


def _seconds(ax: Axes, rows: list[Row], key: str, look: dict[str, Any]) -> None:
    sizes = sorted({row["vocabulary"] for row in rows})
    ax.plot(sizes, [_median(rows, size, key) for size in sizes], lw=1.2, **look)


def _last(rows: list[Row]) -> tuple[float, float]:
    size = max(row["vocabulary"] for row in rows)
    return size, _median(rows, size, "closed_form_seconds")


def _median(rows: list[Row], size: float, key: str) -> float:
    own = sorted(row[key] for row in rows if row["vocabulary"] == size)
    return own[len(own) // 2]
