"""Speed over plain decoding and seconds of an answer, with 90 %, and the nats a token spent."""

from . import _style as style
from ._style import Axes, Figure, Path, Row

PANELS = {"over_plain": "tokens/s, × plain", "seconds_per_answer": "seconds an answer"}


def draw(data: Path) -> Figure:
    """Return the figure from ``compare.csv``: a row a setting, a line at lossless drafting."""
    rows = style.read(data / "compare.csv")[::-1]
    figure, panels = style.panels(len(PANELS), height=0.7 + 0.3 * len(rows))
    for axes, (column, name) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, rows, column)
        axes.set_xlabel(name)
    if not style.narrow():
        panels[1].set_yticklabels([])
    return figure


def _panel(axes: Axes, rows: list[Row], column: str) -> None:
    lossless = next(row for row in rows if row["over_lossless"] == 1)
    axes.axvline(lossless[column], color=style.MUTED, lw=0.8)
    for place, row in enumerate(rows):
        kind = style.band_of({"policy": row["method"], "verifier": row["verifier"]})
        look = style.look("band_price" if kind == "band" else kind)
        middle, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
        ends = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
        axes.errorbar(middle, place, xerr=ends, lw=1.2, **look.options())
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _name(row: Row) -> str:
    if not row["num_draft_tokens"]:
        return row["method"]
    others = (row["knob"] or "").partition(",")[2]
    setting = f"{row['verifier']}, {row['num_draft_tokens']:.0f}"
    spent = f", {row['kl_per_token']:.3f} nats" if row["level"] else ""
    return f"{row['method']}{' ' * bool(others)}{others} ({setting}){spent}"
