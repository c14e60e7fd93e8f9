"""Lengths of answers under lossy policies over lengths of lossless answers to the same prompts."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# half-width of a 95 % interval, in standard errors
WIDE = 1.96
# nats per token of the rows that are drawn in the right panel
LEVEL = 0.05
# series → policy whose look the series has
LOOK = {
    "band": "band_price", "band, head": "band_delta", "cactus": "cactus", "lenience": "other",
}  # fmt: skip
# OTHERS: measured by others (github.com/chiatzenw-cur/lossy-token-eff, 2026), lengths of answers
# with thinking over lossless lengths, for gpt-oss-20b and Qwen3-8B under Cactus at δ = 0.03 to
# 0.35. THEIR_NATS: nats per token of these δ on our shipped pair, as their runs were not metered
OTHERS, THEIR_NATS = (1.1, 2.5), (0.24, 0.42)


def draw(data: Path) -> Figure:
    """Return the figure from ``answers_stories.csv`` and ``lengths_stories.csv``."""
    figure, (left, right) = style.panels(2, height=3.3)
    _stories(left, style.read(data / "answers_stories.csv"))
    _own_laws(right, style.read(data / "lengths_stories.csv"))
    style.legend_below(figure, left, across=4)
    return figure


def _stories(axes: Axes, rows: list[Row]) -> None:
    """Draw the ratio of mean lengths against the metered KL, with 95 % intervals."""
    for name, look in LOOK.items():
        own = [row for row in rows if kind(f"{row['method']}:{row['knob']}") == name]
        spent, ratio, error = style.curve(
            own, "emitted_kl_per_token", "length_ratio", "length_ratio_se"
        )
        options: Any = style.look(look).options() | {"capsize": 2, "label": name}
        axes.errorbar(spent, ratio, [WIDE * value for value in error], **options)
    axes.fill_between(THEIR_NATS, *OTHERS, color=style.GRID, lw=0, zorder=0)
    text = "larger models that think,\nloosest settings (lossy-token-eff)"
    style.label(axes, text, (THEIR_NATS[0], OTHERS[1]), style.MUTED, shift=(-4, -10), fontsize=7)
    axes.axhline(1, color=style.INK, lw=1, ls=":")
    style.log_axis(axes.xaxis, (0.02, 0.05, 0.1, 0.4), "emitted KL, nats per token")
    axes.set(ylabel="length over lossless, 95 %", title="Stories pair")


def _own_laws(axes: Axes, rows: list[Row]) -> None:
    """Draw lengths of texts sampled from the laws against their expected target calls."""
    for row in (row for row in rows if row["level"] == LEVEL):
        name = kind(row["policy"])
        options: Any = style.look(LOOK[name.split(",")[0]]).options(5) | {"capsize": 2}
        errors = {"xerr": WIDE * row["calls_ratio_se"], "yerr": WIDE * row["length_ratio_se"]}
        at = row["calls_ratio"], row["length_ratio"]
        axes.errorbar(*at, **errors, **options)
        # the points of lenience and the band overlap, so the band's name is to the left
        shift = (-30, 8) if name == "band" else (5, 6)
        style.label(axes, name, at, options["color"], shift=shift, ha="left")
    for line in (axes.axhline, axes.axvline):
        line(1, color=style.INK, lw=1, ls=":")
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel="expected calls an answer, over lossless", ylabel="length over lossless, 95 %",
             title=f"Every token by the law, {LEVEL:g} nats")  # fmt: skip


def kind(policy: str) -> str:
    """Return a policy's name followed by a band's boxes, such as ``band`` or ``band, head``."""
    name, _, knobs = policy.partition(":")
    return ", ".join([name, *(box for box in ("head", "floor", "hold") if f"{box}=" in knobs)])
