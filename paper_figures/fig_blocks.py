"""Whole drafted paths against single tokens: tokens per target call at equal emitted KL."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# half-length of error bars in standard errors: two are about a 95 % interval
ERRORS = 2
CURVES = {
    "band:price, block": ("band_block", "-", "D", "band, constant price, block"),
    "band:price,per_row=True, block": ("band_price", "-", "o", "each row's own band, block"),
    "band:price, chain": ("band_price", "--", "o", "band, constant price, token by token"),
    "cactus:delta, block": ("cactus", "-", "^", "Cactus, block (its emitted law)"),
    "cactus:delta, chain": ("cactus", "--", "^", "Cactus, token by token"),
}
KL_TICKS = (0.01, 0.03, 0.1)


def draw(data: Path) -> Figure:
    """Return the figure from ``blocks.csv``: a panel for every K."""
    rows = style.read(data / "blocks.csv")
    widths = sorted({row["num_draft_tokens"] for row in rows})
    figure, panels = style.panels(len(widths), height=3.6)
    for axes, width in zip(panels, widths, strict=True):
        lossy = [row for row in rows if row["kl_per_token"] > 0]
        _curves(axes, [row for row in lossy if row["num_draft_tokens"] == width])
        axes.set_title(f"K = {width:g}")
        style.log_axis(axes.xaxis, KL_TICKS, "emitted KL, nats per token")
        axes.margins(y=0.1)
    panels[0].set_ylabel("tokens per target call,\nover the band token by token")
    bottom, top = zip(*(axes.get_ylim() for axes in panels), strict=True)
    for axes in panels:
        axes.set_ylim(min(bottom), max(top))
    style.headline(figure, "Whole paths make more tokens per call, the more the longer the draft")
    style.legend_below(figure, panels[0])
    return figure


def _curves(axes: Axes, rows: list[Row]) -> None:
    for start, (colour, line, marker, name) in CURVES.items():
        family = [row for row in rows if str(row["family"]).startswith(start)]
        spent, ratio, error = style.curve(family, "kl_per_token", "ratio", "ratio_se")
        look: Any = {"color": style.COLOUR[colour], "ls": line, "marker": marker}
        look["mfc"] = "white" if line == "--" else None
        errors = [ERRORS * width for width in error]
        axes.errorbar(spent, ratio, errors, ms=3.8, lw=1.3, elinewidth=0.8, label=name, **look)
