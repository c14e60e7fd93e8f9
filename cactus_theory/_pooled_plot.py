"""The picture of many rows together: the pooled frontier, and policies on it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory._looks import COLOUR, INK, OPTIMUM
from cactus_theory._plot import FRONTIER_POINTS, check_picture, write_picture

# whatever the policies are; the optimum has the blue
SHOWN = ("cactus", "typical", "soft_band", "cactus_exact", "band_delta", "speculative")
COLOURS = [COLOUR[name] for name in SHOWN]
MARKERS = "osD^vP*X"


def save_pooled_plot(
    path: str, line: Any, divergence: str, points: Sequence[tuple[str, float, float]]
) -> None:
    """Draw a pooled frontier with policies (name, mean divergence, mean acceptance).

    The points of a line with corners are marked: nothing is known between them.

    Raises
    ------
    ValueError, OSError
        Another suffix than .png, .pdf or .svg; a file that cannot be written.
    ModuleNotFoundError
        Without matplotlib (extra ``figures``).
    """
    check_picture(path)
    check.optional_module("matplotlib", "figures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e8e8e8", linewidth=0.6)
    delta, accepted = (np.asarray(column, np.float64) for column in (line.delta, line.acceptance))
    shown = np.isfinite(delta)
    marker = "o" if shown.sum() < FRONTIER_POINTS else ""
    optimum: dict[str, Any] = {"color": OPTIMUM, "marker": marker, "markersize": 3}
    ax.plot(delta[shown], accepted[shown], **optimum, label="optimum over all rows")
    ax.plot(0, accepted[0], "s", color=INK, label="lossless")
    finite = [point for point in points if math.isfinite(point[1])]
    for number, (name, spent, kept) in enumerate(finite):
        marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
        ax.plot(spent, kept, linestyle="none", label=name, marker=marker, color=colour)
    unit = " (nats)" if divergence in ("kl", "reverse_kl") else ""
    ax.set_xlabel(f"mean {divergence} of what is emitted, from the target{unit}")
    ax.set_ylabel("mean acceptance")
    ax.legend(frameon=False, fontsize=8, loc="best")
    write_picture(path, figure, 160)
