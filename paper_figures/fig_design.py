"""A designed row: tokens protected, the ratio capped, KL kept, and what each constraint costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style
from paper_figures._labels import Name, place

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
    named = _tokens(tokens, [row for row in rows if row["kind"] == "token"], curve)
    _curves(curves, curve)
    place({tokens: named})
    return figure


def _tokens(ax: Axes, rows: list[dict[str, Any]], curve: list[dict[str, Any]]) -> list[Name]:
    """Draw what is emitted against what is drafted, relative to the target; return the names."""
    plain, designed = ([row for row in rows if row["design"] == name] for name in ("budget", "cap"))
    cap = next(row["cap"] for row in curve if row["design"] == "cap")
    low = 0.85 * min(row["h"] / row["q"] for row in plain)
    high = 1.6 * max(row["h"] / row["q"] for row in (*plain, *designed))
    ax.plot([low, high], [low, high], color=style.GRID, lw=1.2, zorder=0)
    for height, text in ((1.0, "target"), (cap, f"cap {cap:g}")):
        ax.axhline(height, color=style.MUTED, lw=0.8, ls=(0, (4, 3)), zorder=0)
        style.label(ax, text, (RIGHT, height), style.MUTED, shift=(3, 0), fontsize=7)
    groups = [(plain, COLOUR["budget"], "D", "optimum under KL alone")]
    for role, label in ROLES.items():
        groups.append(
            ([row for row in designed if row["role"] == role], SHADE[role], MARKER[role], label)
        )
    for group, colour, marker, label in groups:
        ratios = [[row[key] / row["q"] for row in group] for key in ("p", "h")]
        sizes = [9 + 500 * max(row["q"], row["p"]) for row in group]
        ax.scatter(*ratios, s=sizes, color=colour, marker=marker, label=label, alpha=0.75, lw=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.ticks(ax.xaxis, (0.03, 0.1, 0.3, 1, 3, 10, 30))
    style.ticks(ax.yaxis, (0.7, 1, 1.5, 2, 3, 5, 10, 20))
    ax.set_xlim(LEFT, RIGHT)
    ax.set_ylim(low * 0.8, high)
    ax.set_xlabel("draft relative to target, p/q")
    ax.set_ylabel("emitted relative to target, h/q")
    ax.set_title("Each kind of token has its ceiling")
    legend = ax.legend(frameon=False, fontsize=7.5, loc="upper left", borderaxespad=0)
    for handle in legend.legend_handles:
        handle.set_sizes([28])  # type: ignore[union-attr]
    sure = [row for row in designed if row["p"] >= LABELLED]
    names = [Name(r["token"], (r["p"] / r["q"], r["h"] / r["q"]), style.INK) for r in sure]
    return [*names, Name("the draft", (10, 10), style.MUTED)]


def _curves(ax: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw acceptance against the budget under one constraint after another."""
    names = {"budget": "KL ≤ δ", "protect": "+ ends protected", "cap": "+ punctuation capped"}
    drawn = rows[-1]["delta"]
    for design, label in names.items():
        mine = sorted((r for r in rows if r["design"] == design), key=lambda row: row["delta"])
        deltas, accepted = style.columns(mine, "delta", "acceptance")
        at = next(row["acceptance"] for row in mine if row["delta"] == drawn)
        ax.plot(deltas, accepted, color=COLOUR[design], ls=LINE[design], label=f"{label}: {at:.3f}")
        ax.plot([drawn], [at], "o", ms=4.5, color=COLOUR[design])
    lossless = rows[0]["lossless"]
    ax.axhline(lossless, color=style.INK, lw=0.9, ls=(0, (4, 3)))
    style.label(ax, f"lossless {lossless:.3f}", (rows[0]["delta"], lossless), style.INK,
                shift=(0, -7))  # fmt: skip
    ax.axvline(drawn, color=style.GRID, lw=1.2, zorder=0)
    ax.set_ylim(lossless - 0.06, None)
    ax.legend(frameon=False, fontsize=8, loc="upper left", title=f"accepted at δ = {drawn:g}",
              title_fontsize=8, alignment="left")  # fmt: skip
    ax.set_xscale("log")
    style.ticks(ax.xaxis, (0.003, 0.01, 0.03, 0.1, 0.3, 1))
    ax.set_xlabel("KL budget δ, nats")
    ax.set_ylabel("acceptance")
    ax.set_title("What each constraint costs")
