"""A designed row: tokens protected, the ratio capped, KL kept, and what each constraint costs."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

# tokens that the draft gives this much are named
LABELLED = 0.05
LEFT, RIGHT = 0.03, 30
COLOUR = {
    "budget": style.COLOUR["band_delta"],
    "protect": style.COLOUR["soft_band"],
    "cap": style.COLOUR["own"],
}
ROLES = {
    "free": "designed",
    "capped": "designed, punctuation",
    "protected": "designed, ends a sentence or line",
}
SHADE = {
    "free": COLOUR["cap"],
    "capped": style.COLOUR["cactus_exact"],
    "protected": COLOUR["protect"],
}
MARKER = {"free": "o", "capped": "^", "protected": "s"}
LINE = {"budget": "-", "protect": "--", "cap": "-."}


def draw(data: Path) -> Figure:
    """Return the figure from ``design_example.csv``: what becomes of each token, and the cost."""
    rows = style.read(data / "design_example.csv")
    figure, (tokens, curves) = style.panels(2, height=3.7)
    curve = [row for row in rows if row["kind"] == "curve"]
    _tokens(tokens, [row for row in rows if row["kind"] == "token"], curve)
    _curves(curves, curve)
    return figure


def _tokens(axes: Axes, rows: list[Row], curve: list[Row]) -> None:
    """Draw what is emitted against what is drafted, relative to the target."""
    plain, designed = ([row for row in rows if row["design"] == name] for name in ("budget", "cap"))
    cap = next(row["cap"] for row in curve if row["design"] == "cap")
    low = 0.85 * min(row["h"] / row["q"] for row in plain)
    high = 1.6 * max(row["h"] / row["q"] for row in (*plain, *designed))
    axes.plot([low, high], [low, high], color=style.GRID, lw=1.2, zorder=0)
    for height, text in ((1.0, "target"), (cap, f"cap {cap:g}")):
        axes.axhline(height, color=style.MUTED, lw=0.8, ls=(0, (4, 3)), zorder=0)
        style.label(axes, text, (RIGHT, height), style.MUTED, shift=(3, 0), fontsize=7)
    groups = [(plain, COLOUR["budget"], "D", "optimum under KL alone")]
    for role, label in ROLES.items():
        tokens = [row for row in designed if row["role"] == role]
        groups.append((tokens, SHADE[role], MARKER[role], label))
    for group, colour, marker, label in groups:
        ratios = [[row[key] / row["q"] for row in group] for key in ("p", "h")]
        sizes = [9 + 500 * max(row["q"], row["p"]) for row in group]
        axes.scatter(*ratios, s=sizes, color=colour, marker=marker, label=label, alpha=0.75, lw=0)
    style.log_axis(axes.xaxis, (0.03, 0.1, 0.3, 1, 3, 10, 30), "draft relative to target, p/q")
    heights = (0.7, 1, 1.5, 2, 3, 5, 10, 20)
    style.log_axis(axes.yaxis, heights, "emitted relative to target, h/q")
    axes.set(xlim=(LEFT, RIGHT), ylim=(low * 0.8, high), title="Each kind of token has its ceiling")
    legend = axes.legend(frameon=False, fontsize=7.5, loc="upper left", borderaxespad=0)
    for handle in legend.legend_handles:
        handle.set_sizes([28])  # type: ignore[union-attr]
    for row in designed:
        if row["p"] >= LABELLED:
            at = row["p"] / row["q"], row["h"] / row["q"]
            style.label(axes, row["token"], at, style.INK, shift=(0, 0), ha="center", fontsize=7)
    style.label(axes, "the draft", (5, 5), style.MUTED, shift=(8, -4), fontsize=7)


def _curves(axes: Axes, rows: list[Row]) -> None:
    """Draw acceptance against the budget under one constraint after another."""
    names = {"budget": "KL ≤ δ", "protect": "+ ends protected", "cap": "+ punctuation capped"}
    drawn = rows[-1]["delta"]
    for design, label in names.items():
        curve = [row for row in rows if row["design"] == design]
        deltas, accepted = style.curve(curve, "delta", "acceptance")
        at = next(row["acceptance"] for row in curve if row["delta"] == drawn)
        look: Any = {"color": COLOUR[design], "ls": LINE[design], "label": f"{label}: {at:.3f}"}
        axes.plot(deltas, accepted, **look)
        axes.plot([drawn], [at], "o", ms=4.5, color=COLOUR[design])
    lossless = rows[0]["lossless"]
    axes.axhline(lossless, color=style.INK, lw=0.9, ls=(0, (4, 3)))
    style.label(axes, f"lossless {lossless:.3f}", (rows[0]["delta"], lossless), style.INK,
                shift=(0, -7))  # fmt: skip
    axes.axvline(drawn, color=style.GRID, lw=1.2, zorder=0)
    axes.set_ylim(lossless - 0.06, None)
    axes.legend(frameon=False, fontsize=8, loc="upper left", title=f"accepted at δ = {drawn:g}",
                title_fontsize=8, alignment="left")  # fmt: skip
    style.log_axis(axes.xaxis, (0.003, 0.01, 0.03, 0.1, 0.3, 1), "KL budget δ, nats")
    axes.set(ylabel="acceptance", title="What each constraint costs")
