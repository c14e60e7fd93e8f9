"""Siblings beside a drafted path: tokens per call at equal emitted KL, and what a pass may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

# standard errors drawn
ERRORS = 2
TEMPERATURES = {1.0: ("band_price", "-", "o"), 0.6: ("cactus", "--", "^")}
FORWARDS = {"own": ("other", "-", "this package's pass"), "library": ("other", ":", "library's")}


def draw(data: Path) -> Figure:
    """Return the figure from ``trees.csv`` and ``trees_passes.csv``: the gain, and its price."""
    rows, timed = style.read(data / "trees.csv"), style.read(data / "trees_passes.csv")
    width = rows[0]["num_draft_tokens"]
    trees = [row for row in rows if row["verifier"] == "tree" and row["num_draft_tokens"] == width]
    figure, (gain, price) = style.panels(2, height=3.4)
    most = max(row["siblings"] for row in trees)
    for temperature, (colour, line, marker) in TEMPERATURES.items():
        own = [row for row in trees if row["temperature"] == temperature]
        look: Any = {"color": style.COLOUR[colour], "ls": line, "marker": marker, "ms": 4}
        _gain(gain, [row for row in own if row["siblings"] == most], temperature, look)
        own = [row for row in own if row["policy"] == "speculative"]
        points = sorted((1 + width * (1 + row["siblings"]), row["pays_below"]) for row in own)
        price.plot(*zip(*points, strict=True), label=f"pays below, T = {temperature:g}", **look)
    for name, (colour, line, said) in FORWARDS.items():
        own = [row for row in timed if row["forward"] == name and row["num_draft_tokens"] == width]
        points = sorted((row["nodes"], row["times_path"]) for row in own)
        look = {"color": style.COLOUR[colour], "ls": line, "marker": "s", "ms": 3.5}
        price.plot(*zip(*points, strict=True), label=said, **look)
    gain.axhline(1, color=style.GRID, zorder=0)
    gain.set(xlabel="emitted KL, nats per token", ylabel="tokens per call, over the block's")
    gain.set_title(f"K = {width:g}, {most:g} siblings a place")
    gain.legend(frameon=False, fontsize=7.5)
    price.set(xlabel="tokens of the target's pass", ylabel="time of the pass, over the path's")
    price.set_title("what the pass costs, and may cost")
    price.legend(frameon=False, fontsize=7.5)
    return figure


def _gain(ax: Axes, rows: list[dict[str, Any]], temperature: float, look: dict[str, Any]) -> None:
    """Draw the gain at no cost and at each level of KL."""
    own = [row for row in rows if row["policy"] in ("speculative", "band:price")]
    own.sort(key=lambda row: row["kl_per_token"])
    spent, ratio, error = style.columns(own, "kl_per_token", "ratio_to_block", "ratio_to_block_se")
    errors = [ERRORS * one for one in error]
    ax.errorbar(spent, ratio, errors, lw=1.3, elinewidth=0.8, label=f"T = {temperature:g}", **look)
