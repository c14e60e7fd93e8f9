"""KL that Cactus spends over its budget, per proposal and in the emitted law."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

# colours of budgets, light to dark, in the hue of the published formula
SHADES = ("#F2A774", "#E67E38", style.look("cactus").colour, "#9C4300", "#5E2900")
# alignment of the maxima's names, and their shift in typographic points
PLACES = (*[("right", (-6, 5))] * 4, ("center", (4, -33)))
EXAMPLES = {
    "25 of 1000 tokens": ("-", "draft sure of 25 of 1000 tokens"),
    "3 tokens": ((0, (5, 2)), "three tokens"),
}
# place of a name in the right panel, above the knee of the upper lines
PEAK = (0.11, 34.0)


def draw(data: Path) -> Figure:
    """Return the figure from ``overspend.csv``, and real rows from ``acceptance_kl.csv``."""
    rows = style.read(data / "overspend.csv")
    figure, (left, right) = style.panels(2, height=3.4)
    _per_proposal(left, rows)
    _emitted(right, rows)
    _real_rows(right, style.read(data / "acceptance_kl.csv"))
    return figure


def _per_proposal(axes: Axes, rows: list[Row]) -> None:
    """Draw KL of the drafted token's row over δ against q_n, and mark the maxima."""
    axes.set(title="A token that Cactus raises costs up to 2δ", xlim=(0, 1), ylim=(0, 2.2))
    axes.set(xlabel="target probability of the drafted token", ylabel="KL(proposal ‖ target) / δ")
    top = [row for row in rows if row["kind"] == "maximum"]
    for shade, place, best in zip(SHADES, PLACES, top, strict=True):
        curve = [row for row in rows if row["kind"] == "curve" and row["policy"] == "cactus"]
        curve = [row for row in curve if row["delta"] == best["delta"]]
        axes.plot(*style.columns(curve, "q_n", "kl_over_delta"), color=shade)
        peak = (best["q_n"], best["kl_over_delta"])
        axes.plot(*peak, "o", color=shade, markersize=4.5, clip_on=False)
        text = f"δ = {best['delta']:g}: {peak[1]:.2f}"
        style.label(axes, text, peak, style.INK, ha=place[0], shift=place[1])
    _promise(axes, (0.87, 1), "promised", ha="right", shift=(0, -6))


def _emitted(axes: Axes, rows: list[Row]) -> None:
    """Draw KL of the emitted law over δ against δ, for two pairs of rows."""
    axes.set_title("What Cactus emits can cost far more")
    style.log_axis(axes.xaxis, (0.001, 0.01, 0.1, 1), "budget δ, nats")
    style.log_axis(axes.yaxis, (0.3, 1, 3, 10, 30, 100), "KL(emitted ‖ target) / δ")
    axes.set_ylim(0.15, 120)
    for example, (dashes, text) in EXAMPLES.items():
        for name in ("cactus_exact", "cactus"):
            line = [row for row in rows if (row["example"], row["policy"]) == (example, name)]
            x, y = style.columns(line, "delta", "kl_over_delta")
            axes.plot(x, y, color=style.COLOUR[name], linestyle=dashes)
            if example == "25 of 1000 tokens":
                _name_policy(axes, name, x, y)
        wide = dashes == "-"
        place = {"ha": "center", "shift": (6, 9)} if wide else {"shift": (2, -8)}
        style.label(axes, text, PEAK if wide else (x[0], y[0]), style.INK, **place)
    _promise(axes, (1e-3, 1), "δ itself", shift=(2, -6))


def _real_rows(axes: Axes, rows: list[Row]) -> None:
    """Draw the mean KL over δ on the rows of a real pair."""
    for name in ("cactus_exact", "cactus"):
        line = [row for row in rows if row["series"] == name]
        x = [row["value"] for row in line]
        y = [row["mean_kl"] / row["value"] for row in line]
        axes.plot(x, y, "o:", color=style.COLOUR[name], markersize=3.4, linewidth=0.9)
        if name == "cactus":
            name, end = "mean over real rows", (x[-1], y[-1])
            style.label(axes, name, end, style.INK, shift=(-26, 2))


def _name_policy(axes: Axes, name: str, x: list[float], y: list[float]) -> None:
    """Write a policy's name beside its line: past the knee, or below the first point."""
    late = name == "cactus_exact"
    at = next(point for point in zip(x, y, strict=True) if point[0] > 0.25 or not late)
    text = style.NAME[name].replace(", ", ",\n")
    style.label(axes, text, at, style.COLOUR[name], shift=(5, 7) if late else (2, -14))


def _promise(axes: Axes, at: tuple[float, float], text: str, **options: Any) -> None:
    """Draw and name the horizontal line where the KL equals the budget."""
    axes.axhline(1, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
    style.label(axes, text, at, style.INK, **options)
