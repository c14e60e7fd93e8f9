"""Constant price against constant δ and Cactus in real decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import _style as style

SERIES = ("band_price", "band_delta", "cactus")


def draw(data: Path) -> Figure:
    """Return the figure from ``constant_price.csv``: the trade-off, and the extra KL paid."""
    rows = style.read(data / "constant_price.csv")
    figure, (curve, ratio) = style.panels(2)
    _curve(curve, rows)
    _ratio(ratio, rows)
    return figure


def _curve(ax: Axes, rows: list[dict[str, Any]]) -> None:
    for series in SERIES:
        own = sorted(
            (r["kl_per_token"], r["tokens_per_call"]) for r in rows if r["series"] == series
        )
        xs, ys = zip(*own, strict=True)
        ax.plot(xs, ys, label=style.NAME[series], **style.look(series).options())
    ax.set_xscale("log")
    style.ticks(ax.xaxis, (0.001, 0.01, 0.1, 1))
    ax.set_xlabel("emitted KL per token, nats")
    ax.set_xlim(left=5e-4)
    ax.set_ylabel("tokens per target call")
    ax.set_title(f"Tokens bought, K = {rows[0]['num_draft_tokens']:g}")
    ax.legend(frameon=False, fontsize=7.5, loc="upper left")


def _ratio(ax: Axes, rows: list[dict[str, Any]]) -> None:
    for series in SERIES[1:]:
        own = sorted(
            (r["kl_per_token"], r["kl_ratio"], r["kl_ratio_low"], r["kl_ratio_high"])
            for r in rows
            if r["series"] == series and r["kl_ratio"] is not None
        )
        if not own:
            continue
        xs, ys, lows, highs = zip(*own, strict=True)
        colour = style.COLOUR[series]
        ax.plot(xs, ys, label=style.NAME[series], **style.look(series).options())
        ax.fill_between(xs, lows, highs, color=colour, alpha=0.15, lw=0)
    ax.axhline(1, color=style.COLOUR["band_price"], lw=1.2)
    ax.set_xscale("log")
    style.ticks(ax.xaxis, (0.001, 0.01, 0.1, 1))
    ax.set_xlabel("emitted KL per token, nats")
    ax.set_ylim(0.6, 2.6)
    ax.set_ylabel("KL ÷ that of constant price")
    ax.set_title("KL paid for the same tokens per call")
    ax.legend(frameon=False, fontsize=7.5, loc="best")
