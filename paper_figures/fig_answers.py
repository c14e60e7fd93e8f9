"""Speed over plain decoding, and seconds per answer, against nats per token; 90 % intervals."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

PANELS = {"over_plain": "tokens/s, × plain", "seconds_per_answer": "seconds an answer"}
# shift of a name, in points to the right and up
PLACES = {"tempered": (4, -12), "lenience": (6, 10), "band": (-5, 14), "band hold=2": (-6, -4)}
PLACES |= {"lossless, K = 2": (6, 5)}


def draw(data: Path) -> Figure:
    """Return the figure from ``answers.csv``: one line per policy, through its levels of nats."""
    series: dict[str, list[Row]] = {}
    for row in style.read(data / "answers.csv"):
        series.setdefault(_name(row), []).append(row)
    figure, panels = style.panels(len(PANELS), height=2.9)
    for up, axes, (column, name) in zip((1, -1), panels, PANELS.items(), strict=True):
        for policy, rows in series.items():
            right, above = PLACES.get(policy, (6, -6))
            _line(axes, rows, column, policy, (right, up * above))
        axes.set(ylabel=name, xlabel="metered nats a token")
        axes.margins(x=0.18, y=0.12)
    return figure


def _line(axes: Axes, rows: list[Row], column: str, name: str, shift: tuple[int, int]) -> None:
    kind = style.band_of({"policy": rows[0]["method"], "verifier": rows[0]["verifier"]})
    look = style.look("band_price" if kind == "band" else kind)
    around: Any = {}
    for axis, of in (("x", "kl_per_token"), ("y", column)):
        around |= {axis: [row[of] for row in rows], f"{axis}err": style.sides(rows, of)}
    axes.errorbar(**around, lw=0.8, elinewidth=1.2, **look.options(5))
    style.label(axes, name, (around["x"][-1], around["y"][-1]), look.colour, shift=shift)


def _name(row: Row) -> str:
    if row["method"] == "speculative":
        return f"lossless, K = {row['num_draft_tokens']:.0f}"
    others = (row["knob"] or "").partition(",")[2]
    return f"{row['method']}{' ' * bool(others)}{others}"
