"""Whole drafted paths against single tokens: tokens per target call at equal emitted KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

Row = dict[str, Any]
# one standard error of a paired difference says little by eye; two are drawn
ERRORS = 2
CURVES = {
    "soft_band:price,values": ("soft_band", "-", "D", "soft band with values, block"),
    "soft_band:price, block": ("soft_band", "--", "D", "band of p/P, block"),
    "band:price, block": ("band_price", "-", "o", "band, constant price, block"),
    "band:price, chain": ("band_price", "--", "o", "band, constant price, token by token"),
    "cactus:delta, block": ("cactus", "-", "^", "Cactus, block (its emitted law)"),
    "cactus:delta, chain": ("cactus", "--", "^", "Cactus, token by token"),
}
KL_TICKS = (0.01, 0.03, 0.1)


def draw(data: Path) -> Figure:
    """Return the figure from ``blocks.csv``: a panel for every K."""
    rows = style.read(data / "blocks.csv")
    widths = sorted({row["num_draft_tokens"] for row in rows})
    figure, panels = style.panels(len(widths), height=3.6)
    for ax, width in zip(panels, widths, strict=True):
        own = [row for row in rows if row["num_draft_tokens"] == width and row["kl_per_token"] > 0]
        _curves(ax, own)
        ax.set_title(f"K = {width:g}")
        ax.set_xscale("log")
        style.ticks(ax.xaxis, KL_TICKS)
        ax.set_xlabel("emitted KL, nats per token")
        ax.margins(y=0.1)
    panels[0].set_ylabel("tokens per target call,\nover the band token by token")
    bottom, top = zip(*(ax.get_ylim() for ax in panels), strict=True)
    for ax in panels:
        ax.set_ylim(min(bottom), max(top))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        frameon=False,
        fontsize=7.5,
        ncols=1 if style.narrow() else 2,
    )
    return figure


def _curves(ax: Axes, rows: list[Row]) -> None:
    for start, (colour, line, marker, name) in CURVES.items():
        own = [row for row in rows if str(row["family"]).startswith(start)]
        own.sort(key=lambda row: row["kl_per_token"])
        spent, ratio, error = style.columns(own, "kl_per_token", "ratio", "ratio_se")
        look: Any = {"color": style.COLOUR[colour], "ls": line, "marker": marker}
        if line == "--":
            look["mfc"] = "white"
        errors = [ERRORS * one for one in error]
        ax.errorbar(spent, ratio, errors, ms=3.8, lw=1.3, elinewidth=0.8, label=name, **look)
