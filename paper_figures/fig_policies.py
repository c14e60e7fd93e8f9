"""Tokens a target call against emitted KL of each policy in a real decode."""

from . import _style as style
from ._style import Axes, Figure, Path, Row

LOSSLESS_AT = 1e-3  # where an emitted KL of zero is drawn on the logarithmic axis


def draw(data: Path) -> Figure:
    """Return the figure from ``policies.csv``: one panel per kind of gain."""
    rows = [row for row in style.read(data / "policies.csv") if row["policy"] != "plain"]
    widest = max(row["num_draft_tokens"] for row in rows)
    figure, (calls, speed) = style.panels(2, height=3.8)
    same = [row for row in rows if row["num_draft_tokens"] == widest]
    tuned = [row for row in rows if row["tuned"] == "True"]
    _panel(calls, same, "tokens_per_call", "tokens per target call")
    _panel(speed, tuned, "speedup", "speed-up over plain")
    calls.set_title(f"Tokens bought by divergence, K = {widest:g}")
    speed.set_title("Measured speed, each at its fastest K")
    style.legend_below(figure, calls, across=3)
    return figure


def _panel(axes: Axes, rows: list[Row], key: str, name: str) -> None:
    """Draw one panel, a curve for each series of a knob."""
    heights = [row[key] for row in rows]
    margin = 0.08 * (max(heights) - min(heights) or 1.0)
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    ticks = (0.01, 0.1, 1.0)
    style.log_axis(axes.xaxis, (LOSSLESS_AT, *ticks), "emitted KL per token, nats")
    axes.set_xlim(LOSSLESS_AT * 0.6, 25 * max(row["emitted_kl_per_token"] for row in rows))
    axes.set_xticklabels(["0", *(f"{value:g}" for value in ticks)])
    axes.set_ylabel(name)
    if key == "speedup":
        axes.axhline(1, color=style.MUTED, lw=0.8, ls=":")
    named = [(style.series(row["policy"], row["knob"]), row) for row in rows]
    for series in sorted({name for name, _ in named}):
        own = sorted((row for name, row in named if name == series), key=lambda r: _at(r, key))
        points = zip(*(_at(row, key) for row in own), strict=True)
        look = style.look(series).options(4.5)
        axes.plot(*points, lw=0.9, label=_name(own), **look)


def _at(row: Row, key: str) -> tuple[float, float]:
    return max(row["emitted_kl_per_token"], LOSSLESS_AT), row[key]


def _name(rows: list[Row]) -> str:
    """Return the policy with its knob's values, in order of what is emitted."""
    knob, _, _ = str(rows[0]["knob"] or "").partition("=")
    values = ", ".join(str(row["knob"] or "").partition("=")[2] for row in rows)
    name = rows[0]["policy"].replace("_", " ")
    return f"{name}, {knob.replace('delta', 'δ')} {values}" if knob else name
