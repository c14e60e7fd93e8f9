"""Lengths of answers under lossy policies, beside lossless ones of the same prompts."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import _style as style
from ._style import Row

# half-width of a 95 % interval, in standard errors
WIDE = 1.96
# nats a token at which Markov models are drawn
LEVEL = 0.1
# series → the policy of other figures whose look it has
LOOK = {
    "band": "band_price", "band, head": "band_delta", "cactus": "cactus", "lenience": "other",
}  # fmt: skip
# what others measured (github.com/chiatzenw-cur/lossy-token-eff, 2026): the lengths of answers with
# thinking, of gpt-oss-20b and Qwen3-8B under Cactus at δ = 0.03 to 0.35, over lossless ones. These
# δ are so many nats a token on our shipped pair; theirs were not metered
OTHERS, THEIR_NATS = (1.1, 2.5), (0.24, 0.42)


def draw(data: Path) -> Figure:
    """Return the figure from ``answers_stories.csv`` and ``answers_markov.csv``."""
    stories, markov = (style.read(data / f"answers_{name}.csv") for name in ("stories", "markov"))
    figure, (left, right) = style.panels(2, height=3.3)
    _stories(left, stories)
    _markov(right, markov)
    style.legend_below(figure, left, across=4)
    return figure


def _stories(axes: Axes, rows: list[Row]) -> None:
    """Draw the ratio of mean lengths against the metered KL, with 95 % intervals."""
    lossy = [row | {"family": f"{row['method']}:{row['knob']}"} for row in rows]
    for name, look in LOOK.items():
        own = [row for row in lossy if _kind(row) == name]
        spent, ratio, error = style.curve(
            own, "emitted_kl_per_token", "length_ratio", "length_ratio_se"
        )
        options: Any = style.look(look).options() | {"capsize": 2, "label": name}
        axes.errorbar(spent, ratio, [WIDE * value for value in error], **options)
    axes.fill_between(THEIR_NATS, *OTHERS, color=style.GRID, lw=0, zorder=0)
    text = "larger models that think,\nloosest settings (lossy-token-eff)"
    place: Any = {"shift": (-4, -10), "ha": "right", "fontsize": 7}
    style.label(axes, text, (THEIR_NATS[0], OTHERS[1]), style.MUTED, **place)
    axes.axhline(1, color=style.INK, lw=1, ls=":")
    style.log_axis(axes.xaxis, (0.02, 0.05, 0.1, 0.4), "emitted KL, nats per token")
    axes.set(ylabel="length over lossless, 95 %", title="Stories pair")


def _markov(axes: Axes, rows: list[Row]) -> None:
    """Draw the exact ratio of each model against how long the draft's own texts are."""
    for name, look in LOOK.items():
        own = [row for row in rows if row["level"] == LEVEL and _kind(row) == name]
        draft, ratio = style.curve(own, "draft_ratio", "length_ratio")
        options: Any = style.look(look).options() | {"ls": "none"}
        axes.plot(draft, ratio, **options)
    ends = [min(row["draft_ratio"] for row in rows), max(row["draft_ratio"] for row in rows)]
    axes.plot(ends, ends, color=style.MUTED, lw=1, ls="--")
    style.label(axes, "as the draft", (ends[1], ends[1]), style.MUTED, shift=(-4, 0), ha="right")
    axes.axhline(1, color=style.INK, lw=1, ls=":")
    for axis in (axes.xaxis, axes.yaxis):
        style.log_axis(axis, (0.2, 0.5, 1, 2, 4))
    axes.set(xlabel="the draft's texts over the target's", ylabel="length over lossless",
             title=f"Markov models, {LEVEL:g} nats per token")  # fmt: skip


def _kind(row: Row) -> str:
    name, _, knobs = str(row["family"]).partition(":")
    return f"{name}, head" if "head=" in knobs else name
