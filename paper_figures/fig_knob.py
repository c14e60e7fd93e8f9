"""What turning the knob does: accepted tokens and speed, and what was published of Cactus."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

DELTA_TICKS = (0.0001, 0.001, 0.01, 0.1, 1)
MARKERS = {3.0: "v", 7.0: "^"}
PUBLISHED = {"GSM8K": "s", "GPQA": "D"}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput.csv`` and ``published.csv``: one text at a time."""
    rows = [row for row in style.read(data / "throughput.csv") if row["batch"] == 1]
    figure, (accepted, speed) = style.panels(2, height=3.5)
    for width in sorted({row["num_draft_tokens"] for row in rows if row["method"] == "cactus"}):
        _curves(accepted, speed, [row for row in rows if row["num_draft_tokens"] == width], width)
    _published(accepted, style.read(data / "published.csv"))
    for axes in (accepted, speed):
        axes.axhline(1, color=style.INK, lw=0.8, ls=":")
        style.log_axis(axes.xaxis, DELTA_TICKS, "δ of Cactus")
    accepted.set(ylabel="accepted tokens a call, over lossless", title="Accepted tokens")
    speed.set(ylabel="tokens per second, over plain", title="Speed")
    accepted.legend(frameon=False, fontsize=7.5, loc="upper left")
    return figure


def _curves(accepted: Axes, speed: Axes, rows: list[Row], width: float) -> None:
    lossless = next(row for row in rows if row["method"] == "speculative")
    cactus = sorted((r for r in rows if r["method"] == "cactus"), key=_delta)
    deltas = [_delta(row) for row in cactus]
    look: Any = style.look("cactus").options() | {"marker": MARKERS.get(width, "o")}
    if width > min(MARKERS):
        look["mfc"] = "white"
    base = lossless["accepted_per_call"]
    ratios = [row["accepted_per_call"] / base for row in cactus]
    accepted.plot(deltas, ratios, lw=1.2, label=f"shipped pair, K = {width:g}", **look)
    times = [row["speedup_over_plain"] for row in cactus]
    sides = [
        [abs(row["speedup_over_plain"] - row[f"speedup_over_plain_{end}"]) for row in cactus]
        for end in ("low", "high")
    ]
    speed.errorbar(deltas, times, sides, lw=1.2, elinewidth=0.8, **look)


def _published(axes: Axes, rows: list[Row]) -> None:
    for task, marker in PUBLISHED.items():
        published = [row for row in rows if row["task"] == task]
        base = next(r["accepted_per_call"] for r in published if r["method"] == "speculative")
        points = [(r["delta"], r["accepted_per_call"] / base) for r in published if r["delta"]]
        name = f"published, {task}, K = 20"
        axes.plot(*zip(*points, strict=True), marker=marker, ms=4, ls="", color=style.INK,
                  mfc="white", label=name)  # fmt: skip


def _delta(row: Row) -> float:
    return float(str(row["knob"]).removeprefix("delta="))
