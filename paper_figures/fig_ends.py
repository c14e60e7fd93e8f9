"""Lengths of answers against a law's probability of an end along the target's texts."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row
from .fig_lengths import LEVEL, WIDE, kind

# pair → (name, policy whose look the pair has)
PAIRS = {
    "stories": ("stories pair", "band_price"),
    "smollm2_skip3": ("SmolLM2, drafted without 3 layers", "cactus"),
    "smollm2_4bit": ("SmolLM2, drafted in 4 bits", "other"),
}
# shift of a name, in points to the right and up
PLACES = {
    (PAIRS["stories"][0], "lenience"): (-5, 12), (PAIRS["stories"][0], "floor"): (5, 4),
    (PAIRS["smollm2_skip3"][0], "band"): (3, 13), (PAIRS["smollm2_4bit"][0], "band"): (-5, 4),
}  # fmt: skip


def draw(data: Path) -> Figure:
    """Return the figure from the tables ``lengths_*.csv``."""
    figure, (axes,) = style.panels(1, height=3.6)
    for pair, (name, look) in PAIRS.items():
        rows = style.read(data / f"lengths_{pair}.csv")
        _points(axes, [row for row in rows if row["level"] == LEVEL], name, style.look(look))
    for line in (axes.axhline, axes.axvline):
        line(1, color=style.INK, lw=1, ls=":")
    axes.set(ylabel="length over lossless, 95 %", title=f"Every token by the law, {LEVEL:g} nats",
             xlim=(0.83, 1.57))  # fmt: skip
    style.log_axis(
        axes.xaxis, (0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5),
        "chance of an end, the law's over the target's",
    )  # fmt: skip
    style.legend_below(figure, axes, across=3)
    return figure


def _points(axes: Axes, rows: list[Row], pair: str, look: style.Look) -> None:
    options: Any = look.options(5) | {"ls": "", "capsize": 2, "elinewidth": 1}
    length = "length_ratio_adjusted" if "length_ratio_adjusted" in rows[0] else "length_ratio"
    found = [[row[name] for row in rows]
             for name in ("end_ratio_at_lossless_texts", length, f"{length}_se")]  # fmt: skip
    axes.errorbar(found[0], found[1], [WIDE * error for error in found[2]], **options, label=pair)
    for row, *at in zip(rows, *found[:2], strict=True):
        name = kind(row["policy"]).removeprefix("band, ")
        usual = (-5 if pair.startswith("stories") else 5, 4)
        shift = PLACES.get((pair, name), usual)
        style.label(axes, name, (at[0], at[1]), options["color"], shift=shift)
