"""Acceptance of each policy against its emitted KL, and its KL over the least possible KL."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# policies in the order they are drawn, from back to front
LINES = ("typical_target", "typical", "cactus_exact", "cactus", "band_delta", "band_price")
# Cactus's budget, in nats, whose point is compared with the least KL in the left panel
SHOWN_DELTA = 0.01
# upper end of the right panel; typical acceptance has a far higher ratio
TOP = 2.9
Series = dict[str, list[Row]]
Columns = tuple[list[float], list[float]]


def draw(data: Path) -> Figure:
    """Return the figure from ``acceptance_kl.csv``."""
    series: Series = {}
    for row in style.read(data / "acceptance_kl.csv"):
        series.setdefault(row["series"], []).append(row)
    figure, (left, right) = style.panels(2, height=3.5)
    _trade_off(left, series)
    _overpaid(right, series)
    return figure


def _trade_off(axes: Axes, series: Series) -> None:
    """Draw mean acceptance over mean emitted KL."""
    axes.set_title("The band accepts most at every KL")
    ticks = (0.003, 0.01, 0.03, 0.1, 0.3, 1)
    style.log_axis(axes.xaxis, ticks, "mean KL(emitted ‖ target) per token, nats")
    axes.set(xlim=(2.5e-3, 2), ylabel="mean acceptance")
    floor = series["speculative"][0]["mean_acceptance"]
    axes.axhline(floor, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    text = "lossless: KL = 0"
    style.label(axes, text, (2.5e-3, floor), style.INK, shift=(3, -7))
    drawn = {name: _plot(axes, name, series, "mean_kl", "mean_acceptance") for name in LINES}
    _compare(axes, *[row for row in series["cactus"] if row["value"] == SHOWN_DELTA])
    best = [point for point in zip(*drawn["band_price"], strict=True) if point[0] < 0.09]
    _name_line(axes, "band_price", best[-1], shift=(-8, 6))
    _name_line(axes, "typical", drawn["typical"], index=0, shift=(7, 2))
    last = drawn["typical_target"][0][-1], drawn["typical_target"][1][-1]
    style.label(axes, "recovering\nfrom q", last, style.COLOUR["typical"], shift=(-6, 4))


def _compare(axes: Axes, row: Row) -> None:
    """Mark the least KL at the acceptance of one point of Cactus."""
    least, spent, height = (row[key] for key in ("frontier_kl", "mean_kl", "mean_acceptance"))
    axes.plot([least, spent], [height, height], color=style.INK, linewidth=1.1, zorder=7)
    axes.plot([least, spent], [height, height], "|", color=style.INK, markersize=6, zorder=7)
    text = f"{row['kl_ratio']:.2f}× the least KL"
    arrow = {"arrowstyle": "-", "color": style.MUTED, "linewidth": 0.6, "shrinkB": 1}
    middle = ((least * spent) ** 0.5, height)
    place = {"xytext": (-38, 33), "textcoords": "offset points", "ha": "center", "va": "center"}
    axes.annotate(text, middle, arrowprops=arrow, fontsize=8, color=style.INK, **place)


def _overpaid(axes: Axes, series: Series) -> None:
    """Draw each policy's KL over the least KL at equal acceptance."""
    most = max(row["kl_ratio"] for row in series["cactus"] if row["kl_ratio"] is not None)
    axes.set_title(f"Cactus spends up to {most:.1f}× the least KL")
    name = "mean KL, relative to the least possible"
    style.log_axis(axes.yaxis, (1, 1.2, 1.5, 2, 2.5), name, unit="×")
    axes.set(xlabel="mean acceptance", ylim=(0.9, TOP))
    drawn = {name: _plot(axes, name, series, "mean_acceptance", "kl_ratio") for name in LINES}
    _name_line(axes, "cactus_exact", drawn["cactus_exact"], index=0, ha="left", shift=(-10, 9))
    _name_line(axes, "cactus", drawn["cactus"], index=0, shift=(-6, 0))
    _name_line(axes, "band_delta", drawn["band_delta"], index=0, ha="left", shift=(-6, 9))
    end, name = (drawn["band_price"][0][0], 1.0), "band, constant price: the best"
    style.label(axes, name, end, style.COLOUR["band_price"], shift=(0, -7))
    both = series["typical"] + series["typical_target"]
    x, y = style.columns(both, "mean_acceptance", "kl_ratio")
    if y and min(y) > TOP:
        text, at = f"typical: off the scale,\n{min(y):.0f}× and more", (max(x), TOP)
        style.label(axes, text, at, style.COLOUR["typical"], shift=(6, -12))


def _plot(axes: Axes, name: str, series: Series, x: str, y: str) -> Columns:
    """Draw the curve of one policy over its knob, and return the curve's points."""
    points = style.columns(series[name], x, y)
    best = name == "band_price"
    options = style.look(name).options(3.4)
    if best:  # a line without points: the knob is drawn densely
        options |= {"marker": "", "lw": 2.2}
    axes.plot(*points, **{"lw": 1.3, "zorder": 5 if best else 3} | options)
    return points[0], points[1]


def _name_line(axes: Axes, name: str, at: Any, index: int | None = None, **options: Any) -> None:
    """Write a policy's name in its colour at a point, or at point ``index`` of its line."""
    point = at if index is None else (at[0][index], at[1][index])
    style.label(axes, style.NAME[name], point, style.COLOUR[name], **options)
