"""Lossy rules of engines compared with the band: nats, tokens per call, changed tokens."""

from matplotlib.lines import Line2D

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

PAIRS = {"rules": "shipped pair", "rules_stories": "stories pair"}
WIDTH = 5  # drafted tokens per round
LOSSLESS_AT = 1e-3  # place of 0 nats on the logarithmic axis
TICKS = (0.01, 0.1, 1.0)
# to the right of these nats the axis has the text of tokens per call
TEXT_FROM = 3.0
PAYS, COULD = style.COLOUR["cactus"], style.COLOUR["band_block"]
TITLES = {
    (1.0, "sampled"): "T = 1, sampled drafts",
    (1.0, "greedy"): "T = 1, greedy drafts",
    (0.0, "greedy"): "T = 0",
}


def draw(data: Path) -> Figure:
    """Return the figure from ``rules.csv`` and ``rules_stories.csv``: a column for each pair."""
    figure, panels = style.panels(6, height=2.45, rows=3)
    for number, (name, pair) in enumerate(PAIRS.items()):
        rows = [row for row in style.read(data / f"{name}.csv") if row["num_draft_tokens"] == WIDTH]
        for axes, kind in zip(panels[number::2], TITLES, strict=True):
            engines = [row for row in rows if (row["temperature"], row["drafts"]) == kind]
            (_prices if kind[0] else _changes)(axes, engines)
            break_or_space = "\n" if style.narrow() else " "
            axes.set_title(f"{pair}:{break_or_space}{TITLES[kind]}", fontsize=8)
            names = [f"{row['engine']}, {row['setting']}" for row in engines]
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(axis="y", labelsize=6.5, length=0)
            axes.tick_params(axis="x", labelsize=7)
            axes.invert_yaxis()
            if number and not style.narrow():
                axes.set_yticklabels([])
    style.headline(figure, "At T = 1 the band makes the tokens of engines' rules for fewer nats")
    _legend(figure)
    return figure


def _prices(axes: Axes, rows: list[Row]) -> None:
    """Draw each rule's nats, and the nats of the band in blocks at equal tokens per call."""
    ticks = TICKS[1::2] if style.narrow() else TICKS
    style.log_axis(axes.xaxis, (LOSSLESS_AT, *ticks))
    axes.set_xlim(LOSSLESS_AT * 0.7, 60)
    axes.set_xticklabels(["0", *(f"{value:g}" for value in ticks)])
    axes.set_xlabel("nats per token", fontsize=7.5)
    for place, row in enumerate(rows):
        paid, could = (row[key] for key in ("kl_per_token", "block_kl_at_tokens"))
        paid = max(paid, LOSSLESS_AT)
        if could is not None:
            could = max(could, LOSSLESS_AT)
            axes.plot((paid, could), (place, place), color=style.MUTED, lw=0.9, zorder=1)
            axes.plot(could, place, "D", ms=4, color=COULD, mfc="white", zorder=3)
        axes.plot(paid, place, "o", ms=4.5, color=PAYS, zorder=2)
        rival = row["block_tokens_at_kl"]
        tokens = f"{row['tokens_per_call']:.1f} → {'–' if rival is None else f'{rival:.1f}'}"
        axes.text(TEXT_FROM, place, tokens, va="center", fontsize=6.5)


def _changes(axes: Axes, rows: list[Row]) -> None:
    """Draw the share of tokens that each greedy rule changes, and its tokens per call."""
    shares = [100 * row["tv_per_token"] for row in rows]
    axes.barh(range(len(rows)), shares, height=0.55, color=PAYS)
    axes.set_xlim(0, max(shares) * 1.45 or 1)
    axes.set_xlabel("changed tokens, %", fontsize=7.5)
    for place, (row, share) in enumerate(zip(rows, shares, strict=True)):
        text = f"{row['tokens_per_call']:.1f}, × {row['tokens_ratio']:.2f}"
        axes.text(share + max(shares) * 0.03, place, text, va="center", fontsize=6.5)


def _legend(figure: Figure) -> None:
    look: Any = {"ls": "", "ms": 5}
    handles = [
        Line2D([], [], marker="o", color=PAYS, label="what the rule pays", **look),
        Line2D([], [], marker="D", color=COULD, mfc="white",
               label="what the band in blocks pays for as many tokens", **look),
        Line2D([], [], ls="", label=f"2.8 → 4.7: tokens per call (K = {WIDTH}), "
               "and the band's at those nats"),
        Line2D([], [], ls="", label="2.5, × 1.2: tokens per call, times those of exact match"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", frameon=False,
                  fontsize=5 if style.narrow() else 7,
                  ncols=1 if style.narrow() else 2)  # fmt: skip
