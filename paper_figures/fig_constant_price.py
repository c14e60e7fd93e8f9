"""Constant price against constant δ and Cactus in real decodes."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

SERIES = ("band_price", "band_delta", "cactus")
TICKS = (0.001, 0.01, 0.1, 1)


def draw(data: Path) -> Figure:
    """Return the figure from ``constant_price.csv``: the trade-off, and the extra KL paid."""
    rows = style.read(data / "constant_price.csv")
    figure, (curve, ratio) = style.panels(2)
    _curve(curve, rows)
    _ratio(ratio, rows)
    return figure


def _curve(axes: Axes, rows: list[Row]) -> None:
    for series in SERIES:
        points = sorted(
            (r["kl_per_token"], r["tokens_per_call"]) for r in rows if r["series"] == series
        )
        axes.plot(
            *zip(*points, strict=True), label=style.NAME[series], **style.look(series).options()
        )
    style.log_axis(axes.xaxis, TICKS, "emitted KL per token, nats")
    axes.set_xlim(left=5e-4)
    axes.set_ylabel("tokens per target call")
    axes.set_title(f"Tokens bought, K = {rows[0]['num_draft_tokens']:g}")
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _ratio(axes: Axes, rows: list[Row]) -> None:
    for series in SERIES[1:]:
        points = sorted(
            (r["kl_per_token"], r["kl_ratio"], r["kl_ratio_low"], r["kl_ratio_high"])
            for r in rows
            if r["series"] == series and r["kl_ratio"] is not None
        )
        if not points:
            continue
        xs, ys, lows, highs = zip(*points, strict=True)
        colour = style.COLOUR[series]
        axes.plot(xs, ys, label=style.NAME[series], **style.look(series).options())
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, lw=0)
    axes.axhline(1, color=style.COLOUR["band_price"], lw=1.2)
    style.log_axis(axes.xaxis, TICKS, "emitted KL per token, nats")
    axes.set_ylim(0.6, 2.6)
    axes.set_ylabel("KL ÷ that of constant price")
    axes.set_title("KL paid for the same tokens per call")
    axes.legend(frameon=False, fontsize=7.5, loc="best")
