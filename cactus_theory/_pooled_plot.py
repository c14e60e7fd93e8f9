"""The picture of many rows together: the pooled frontier, and policies on it."""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory._files import write_whole
from cactus_theory._looks import COLOUR, INK, OPTIMUM

# whatever the policies are; the optimum has the blue
SHOWN = ("cactus", "typical", "soft_band", "cactus_exact", "band_delta", "speculative")
COLOURS = [COLOUR[name] for name in SHOWN]
MARKERS = "osD^vP*X"


def save_pooled_plot(
    path: str, line: Any, divergence: str, points: Sequence[tuple[str, float, float]]
) -> None:
    """Draw a pooled frontier with policies (name, mean divergence, mean acceptance), as PNG.

    Raises
    ------
    ValueError, OSError
        Another suffix than .png; a file that cannot be written.
    ModuleNotFoundError
        Without matplotlib (extra ``figures``).
    """
    if not path.endswith(".png"):
        raise ValueError(f"--plot: must end in .png; got {path!r}")
    check.optional_module("matplotlib", "figures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#e8e8e8", linewidth=0.6)
    delta, accepted = (np.asarray(column, np.float64) for column in (line.delta, line.acceptance))
    shown = np.isfinite(delta)
    ax.plot(delta[shown], accepted[shown], color=OPTIMUM, label="optimum over all rows")
    ax.plot(0, accepted[0], "s", color=INK, label="lossless")
    finite = [point for point in points if math.isfinite(point[1])]
    for number, (name, spent, kept) in enumerate(finite):
        marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
        ax.plot(spent, kept, linestyle="none", label=name, marker=marker, color=colour)
    unit = " (nats)" if divergence in ("kl", "reverse_kl") else ""
    ax.set_xlabel(f"mean {divergence} of what is emitted, from the target{unit}")
    ax.set_ylabel("mean acceptance")
    ax.legend(frameon=False, fontsize=8, loc="best")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=160, metadata={"Software": None})
    write_whole(path, content.getvalue())
