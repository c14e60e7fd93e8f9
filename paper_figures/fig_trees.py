"""Siblings beside a drafted path: tokens per call at equal KL and at equal time of the pass."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

# standard errors drawn
ERRORS = 2
TEMPERATURES = {1.0: ("band_price", "-", "o"), 0.6: ("cactus", "--", "^")}
FORWARDS = {"own": ("other", "-", "this package's pass"), "library": ("other", ":", "library's")}


def draw(data: Path) -> Figure:
    """Return the figure from ``trees.csv`` and ``trees_passes.csv``: gain, price, equal time."""
    rows, passes = style.read(data / "trees.csv"), style.read(data / "trees_passes.csv")
    width = rows[0]["num_draft_tokens"]
    every = [row for row in rows if row["verifier"] == "tree"]
    trees = [row for row in every if row["num_draft_tokens"] == width]
    figure, (gain, price, rival) = style.panels(3, height=3.4)
    most = max(row["siblings"] for row in trees)
    for temperature, (colour, line, marker) in TEMPERATURES.items():
        warm = [row for row in trees if row["temperature"] == temperature]
        look: Any = {"color": style.COLOUR[colour], "ls": line, "marker": marker, "ms": 4}
        _gain(gain, [row for row in warm if row["siblings"] == most], temperature, look)
        lossless = [row for row in warm if row["policy"] == "speculative"]
        points = sorted((1 + width * (1 + row["siblings"]), row["pays_below"]) for row in lossless)
        price.plot(*zip(*points, strict=True), label=f"pays below, T = {temperature:g}", **look)
        timed = [row for row in every if row["temperature"] == temperature and row["equal_time_k"]]
        for k in sorted({row["num_draft_tokens"] for row in timed}):
            line = [row for row in timed if row["num_draft_tokens"] == k]
            _equal_time(rival, line, look | {"label": f"T = {temperature:g}" if k == width else ""})
    for name, (colour, line, label) in FORWARDS.items():
        timed = [r for r in passes if (r["forward"], r["num_draft_tokens"]) == (name, width)]
        nodes, times = style.curve(timed, "nodes", "times_path")
        look = {"color": style.COLOUR[colour], "ls": line, "marker": "s", "ms": 3.5}
        price.plot(nodes, times, label=label, **look)
    gain.axhline(1, color=style.GRID, zorder=0)
    gain.set(xlabel="emitted KL, nats per token", ylabel="tokens per call, over the block's")
    gain.set_title(f"K = {width:g}, {most:g} siblings")
    gain.legend(frameon=False, fontsize=7.5)
    price.set(xlabel="tokens of the target's pass", ylabel="time of the pass, over the path's")
    price.set_title("cost of the pass")
    price.set_ylim(top=1.2 * price.get_ylim()[1])
    price.legend(frameon=False, fontsize=7.5)
    rival.axhline(1, color=style.GRID, zorder=0)
    rival.set(xlabel="tokens of the tree's pass", ylabel="tokens per call, over the longer block's")
    rival.set_title("at equal time of the pass")
    rival.legend(frameon=False, fontsize=7.5)
    return figure


def _gain(axes: Axes, rows: list[Row], temperature: float, look: dict[str, Any]) -> None:
    """Draw the gain at no cost and at each level of KL."""
    levels = [row for row in rows if row["policy"] in ("speculative", "band:price")]
    names = "kl_per_token", "ratio_to_block", "ratio_to_block_se"
    spent, ratio, error = style.curve(levels, *names)
    errors = [ERRORS * width for width in error]
    look = look | {"lw": 1.3, "elinewidth": 0.8, "label": f"T = {temperature:g}"}
    axes.errorbar(spent, ratio, errors, **look)


def _equal_time(axes: Axes, rows: list[Row], look: dict[str, Any]) -> None:
    """Draw the lossless trees of one K beside blocks whose pass takes as long."""
    trees = [row for row in rows if row["policy"] == "speculative"]
    names = "siblings", "num_draft_tokens", "ratio_to_equal_time", "ratio_to_equal_time_se"
    siblings, widths, ratio, error = style.curve(trees, *names)
    nodes = [1 + k * (1 + m) for k, m in zip(widths, siblings, strict=True)]
    errors = [ERRORS * width for width in error]
    axes.errorbar(nodes, ratio, errors, lw=1.3, elinewidth=0.8, **look)
    if trees and trees[0]["temperature"] == 1:
        name, end = f"K = {trees[0]['num_draft_tokens']:g}", (nodes[-1], ratio[-1])
        axes.annotate(name, end, (0, -16), textcoords="offset points", fontsize=7.5)
