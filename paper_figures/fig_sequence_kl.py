"""Tokens per target call against the KL of whole texts, computed by enumeration."""

from . import _style as style
from ._style import Axes, Figure, Path

CURVES = {
    ("band_block", "block"): "band, block",
    ("band", "block"): "band of each row, block",
    ("band", "chain"): "band, token by token",
    ("cactus", "chain"): "Cactus, token by token",
    ("mixture", "chain"): "mixture, token by token",
}
KL_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1)


def draw(data: Path) -> Figure:
    """Return the figure from ``sequence_kl.csv``: the trade-off, and the meter's slack."""
    rows = style.read(data / "sequence_kl.csv")
    figure, (calls, slack) = style.panels(2, height=3.5)
    for key, name in CURVES.items():
        lossy = [row for row in rows if row["kl"] > 0]
        points = [row for row in lossy if (style.band_of(row), row["verifier"]) == key]
        look = style.path_look(key)
        kl, tokens, meter = style.curve(points, "kl", "tokens_per_call", "meter")
        calls.plot(kl, tokens, lw=1.2, label=name, **look)
        slack.plot(kl, [m / k for m, k in zip(meter, kl, strict=True)], lw=1.2, **look)
    for row in rows:
        if row["policy"] == "speculative":
            calls.axhline(row["tokens_per_call"], color=style.INK, lw=0.8, ls=":")
            where = f"lossless, {'block' if row['verifier'] == 'block' else 'token by token'}"
            end = 2 * KL_TICKS[-1], row["tokens_per_call"]
            style.label(calls, where, end, style.INK, shift=(0, 5), ha="right", fontsize=7)
    _frame(calls, "tokens per target call", "Whole texts: blocks make more tokens")
    _frame(slack, "expected meter ÷ KL of the text", "The meter bounds the text's KL")
    slack.axhline(1, color=style.INK, lw=0.8, ls=":")
    calls.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def _frame(axes: Axes, height: str, title: str) -> None:
    style.log_axis(axes.xaxis, KL_TICKS, "KL of the whole text, nats")
    axes.set_xlim(KL_TICKS[0] * 0.8, None)
    axes.set(ylabel=height, title=title)
