"""Speed-up against what is emitted, for the shipped pair and for its law at a larger cost."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

# family → its look
FAMILIES = {"speculative": "speculative", "cactus:delta": "cactus", "band:price": "band_price"}
# place of lossless settings on the logarithmic axis, and the axis's ticks, the table's levels
LOSSLESS = 0.01
TICKS = {LOSSLESS: "lossless", 0.02: "0.02", 0.05: "0.05", 0.1: "0.1"}


def draw(data: Path) -> Figure:
    """Return the figure from ``throughput_134m.csv``, and ``tune.csv`` for the shipped pair."""
    figure, (axes,) = style.panels(1)
    large = [row for row in style.read(data / "throughput_134m.csv") if row["num_draft_tokens"]]
    small = [row for row in style.read(data / "tune.csv") if row["batch"] == 1]
    _curves(axes, large, "cost of 134 M parameters", "-")
    _curves(axes, _chosen(small), "5 M parameters", ":")
    axes.axhline(1, color=style.MUTED, lw=0.8)
    axes.set(xscale="log", xlabel="emitted KL, nats per token", ylabel="times plain decoding")
    axes.set_xticks(list(TICKS), list(TICKS.values()))
    axes.set_xticks([], minor=True)
    style.legend_below(figure, axes)
    return figure


def _chosen(rows: list[Row]) -> list[Row]:
    """Return the setting predicted fastest of each family and level, named as at 134 M."""
    plain = next(row["measured_speed"] for row in rows if row["family"] == "plain")
    best: dict[tuple[str, float], Row] = {}
    for row in sorted(rows, key=lambda row: row["predicted_speed"]):
        best[row["family"], row["level"] if row["family"] != "speculative" else 0.0] = row
    ends = {f"over_plain{end}": f"measured_speed{end}" for end in ("", "_low", "_high")}
    return [
        {"family": family, "emitted_kl_per_token": row["measured_kl"]}
        | {name: row[speed] / plain for name, speed in ends.items()}
        for (family, _), row in best.items()
    ]


def _curves(axes: Axes, rows: list[Row], size: str, line: str) -> None:
    for family, name in FAMILIES.items():
        keys = "emitted_kl_per_token", "over_plain", "over_plain_low", "over_plain_high"
        kl, *speeds = style.curve([row for row in rows if row["family"] == family], *keys)
        middle, low, high = speeds
        ends = [[max(m - at, 0.0) for m, at in zip(middle, low, strict=True)],
                [max(at - m, 0.0) for m, at in zip(middle, high, strict=True)]]  # fmt: skip
        look = style.look(name)
        options: Any = look.options() | {"ls": line, "mfc": look.colour if line == "-" else "white"}
        label = f"{look.name}, {size}"
        places = [max(at, LOSSLESS) for at in kl]
        axes.errorbar(places, middle, ends, lw=1.2, elinewidth=0.8, label=label, **options)
