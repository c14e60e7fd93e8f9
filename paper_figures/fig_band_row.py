"""The band on one real row: the optimal row is p clipped to the range from a·q to b·q."""

from . import _style as style
from ._style import Axes, Figure, Path, Row

# number of tokens whose names fit under the bars
LABELLED = 9


def draw(data: Path) -> Figure:
    """Return the figure from ``band_row.csv``: ratios to q on the left, tokens on the right."""
    rows = style.read(data / "band_row.csv")
    figure, (ratios, tokens) = style.panels(2)
    _ratios(ratios, rows)
    _tokens(tokens, rows)
    return figure


def _ratios(axes: Axes, rows: list[Row]) -> None:
    """Draw p/q, the band and Cactus's emitted law over q, in the order of p/q."""
    left = [row["target_mass_below"] for row in rows] + [1.0]
    for key, colour, label, width in (
        ("p", "#c9c9c9", "draft p/q", 4.5),
        ("cactus", style.COLOUR["cactus"], "Cactus emits", 1.4),
        ("band", style.COLOUR["band_delta"], "the optimum", 2.4),
    ):
        heights = [row[key] / row["q"] for row in rows]
        axes.stairs(heights, left, color=colour, lw=width, label=label, baseline=None)
    lower, upper = rows[0]["lower"], rows[0]["upper"]
    axes.axhspan(lower, upper, color=style.COLOUR["band_delta"], alpha=0.12, lw=0)
    ticks = (0.03, 0.1, 0.3, 1, 3, 10, 30)
    style.log_axis(axes.yaxis, ticks, "probability relative to the target")
    axes.set_ylim(max(min(r["p"] / r["q"] for r in rows), 0.02) * 0.7, upper * 30)
    axes.set_xlim(0, 1)
    edge = style.COLOUR["band_price"]
    style.label(axes, f"b = {upper:.2f}", (0.02, upper), edge, shift=(0, 6))
    style.label(axes, f"a = {lower:.2f}", (0.98, lower), edge, shift=(0, -7), ha="right")
    axes.set(xlabel="tokens in order of p/q, as wide as q", title="The optimum is a band around q")
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _tokens(axes: Axes, rows: list[Row]) -> None:
    """Draw the likeliest tokens of either model as bars."""
    top = sorted(rows, key=lambda row: -max(row["p"], row["q"]))[:LABELLED]
    bars = (
        ("q", style.MUTED, "target q"),
        ("p", style.INK, "draft p"),
        ("band", style.COLOUR["band_delta"], "optimum"),
        ("cactus", style.COLOUR["cactus"], "Cactus emits"),
    )
    for offset, (key, colour, label) in enumerate(bars):
        places = [index + (offset - 1.5) * 0.2 for index in range(len(top))]
        axes.barh(places, [row[key] for row in top], height=0.18, color=colour, label=label)
    axes.set_yticks(
        range(len(top)), [row["token"] for row in top], fontsize=7.5, family="monospace"
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("probability")
    first = rows[0]
    own = f"δ = {first['delta']:g}: optimum accepts {first['acceptance']:.3f}"
    cactus = f"Cactus {first['cactus_acceptance']:.3f} for {first['cactus_nats']:.2f} nats"
    axes.set_title(f"{own} for {first['nats']:.2f} nats,\n{cactus}", fontsize=7.5)
    axes.legend(frameon=False, fontsize=7.5, loc="lower right")
