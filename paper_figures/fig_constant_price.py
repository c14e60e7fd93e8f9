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
        points = [row for row in rows if row["series"] == series]
        spent, tokens = style.curve(points, "kl_per_token", "tokens_per_call")
        axes.plot(spent, tokens, label=style.NAME[series], **style.look(series).options())
    style.log_axis(axes.xaxis, TICKS, "emitted KL per token, nats")
    axes.set_xlim(left=5e-4)
    axes.set_ylabel("tokens per target call")
    axes.set_title(f"Tokens bought, K = {rows[0]['num_draft_tokens']:g}")
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _ratio(axes: Axes, rows: list[Row]) -> None:
    for series in SERIES[1:]:
        points = [row for row in rows if row["series"] == series]
        keys = "kl_per_token", "kl_ratio", "kl_ratio_low", "kl_ratio_high"
        spent, ratio, low, high = style.curve(points, *keys)
        if spent:
            axes.plot(spent, ratio, label=style.NAME[series], **style.look(series).options())
            axes.fill_between(spent, low, high, color=style.COLOUR[series], alpha=0.15, lw=0)
    axes.axhline(1, color=style.COLOUR["band_price"], lw=1.2)
    style.log_axis(axes.xaxis, TICKS, "emitted KL per token, nats")
    axes.set_ylim(0.6, 2.6)
    axes.set(ylabel="KL ÷ that of constant price", title="KL paid for the same tokens per call")
    axes.legend(frameon=False, fontsize=7.5, loc="best")
