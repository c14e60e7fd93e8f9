"""Speed-up against what is emitted, for the shipped pair's law at a larger cost; one run."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from . import _style as style

# family → its look
FAMILIES = {"speculative": "speculative", "cactus:delta": "cactus", "band:price": "band_price"}
# place of lossless settings on the logarithmic axis, and the axis's ticks, the table's levels
LOSSLESS = 0.01
TICKS = {LOSSLESS: "lossless", 0.02: "0.02", 0.05: "0.05", 0.1: "0.1"}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput_134m.csv``."""
    figure, (axes,) = style.panels(1)
    rows = [row for row in style.read(data / "throughput_134m.csv") if row["num_draft_tokens"]]
    for family, name in FAMILIES.items():
        keys = "emitted_kl_per_token", "over_plain", "over_plain_low", "over_plain_high"
        kl, *speeds = style.curve([row for row in rows if row["family"] == family], *keys)
        middle, low, high = speeds
        ends = [[max(m - at, 0.0) for m, at in zip(middle, low, strict=True)],
                [max(at - m, 0.0) for m, at in zip(middle, high, strict=True)]]  # fmt: skip
        look = style.look(name)
        options: Any = look.options() | {"ls": "-", "label": look.name}
        places = [max(at, LOSSLESS) for at in kl]
        axes.errorbar(places, middle, ends, lw=1.2, elinewidth=0.8, **options)
    axes.axhline(1, color=style.MUTED, lw=0.8)
    axes.set(xscale="log", xlabel="emitted KL, nats per token", ylabel="times plain decoding")
    axes.set_xticks(list(TICKS), list(TICKS.values()))
    axes.set_xticks([], minor=True)
    style.legend_below(figure, axes, across=3)
    return figure
