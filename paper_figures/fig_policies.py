"""Tokens per target call at equal nats on logged rows, and the speed of such decodes."""

from . import _style as style
from ._style import Any, Axes, Figure, Path, Row

TITLES = {"speculative": "lossless", "cactus": "Cactus"}
Curves = dict[str, dict[float, tuple[float, float, float]]]


def draw(data: Path) -> Figure:
    """Return the figure from ``equal_nats.csv`` and ``policies.csv``, each at its fastest K."""
    figure, (calls, speed) = style.panels(2, height=3.6)
    _calls(calls, style.read(data / "equal_nats.csv"))
    _speed(speed, style.read(data / "policies.csv"))
    style.legend_below(figure, calls, across=5)
    return figure


def _calls(axes: Axes, rows: list[Row]) -> None:
    """Draw a curve for each policy with a solved knob, and a point for each other policy."""
    curves: Curves = {}
    for row in rows:
        if row["held"] and row["nats"] is not None:
            point = row["nats"], row["over_lossless"], row["over_lossless_se"] or 0.0
            curves.setdefault(row["policy"].partition(":")[0], {})[row["asked"]] = point
    for name, points in curves.items():
        nats, ratio, error = zip((0.0, 1.0, 0.0), *points.values(), strict=True)
        options = _look(name) | {"label": _name(name), "elinewidth": 0.6, "lw": 1.4}
        axes.errorbar(nats, ratio, error, zorder=4 if name == "band" else 3, **options)
    for row in rows:
        if not row["held"] and row["nats"]:
            options = _look(row["policy"].partition(":")[0]) | {"ls": "", "ms": 7}
            at, name = (row["nats"], row["over_lossless"]), _name(row["policy"], ", ")
            axes.plot(*at, **options)
            place: Any = {"xytext": (0.98, 0.06), "textcoords": "axes fraction", "ha": "right"}
            arrow = {"arrowstyle": "-", "color": options["color"], "lw": 0.7, "shrinkB": 5}
            text = f"{name} spends\n{row['nats']:.2g} nats a token"
            look = {"color": options["color"], "fontsize": 7.5, "arrowprops": arrow}
            axes.annotate(text, at, **place, **look)
    axes.plot(0, 1, "s", color=style.INK, ms=4.5, label="lossless", zorder=5)
    axes.set_title(_leaders(curves))
    axes.set(xlabel="emitted KL, nats a token", ylabel="tokens a target call, × lossless")
    axes.margins(0.06)


def _leaders(curves: Curves) -> str:
    """Return the title: which policies are within one standard error of the best at all levels."""
    levels = set.intersection(*map(set, curves.values())) if curves else set()
    first = {_name(name) for name in curves if levels}
    for level in levels:
        least = max(own[level][1] - own[level][2] for own in curves.values())
        first -= {_name(name) for name, own in curves.items() if sum(own[level][1:]) < least}
    if not 0 < len(first) < len(curves):
        return "Policies at equal nats"
    return f"At equal nats {' and '.join(sorted(first))} lead{'s' if len(first) == 1 else ''}"


def _speed(axes: Axes, rows: list[Row]) -> None:
    """Draw the speed-up of each method at its fastest K, with the nats per token."""
    speed = "speedup_over_plain"
    drafted = [row for row in rows if row["method"] != "plain"]
    best = style.fastest(drafted, speed, lambda row: _name(_spec(row)))
    fastest = dict(sorted(best.items(), key=lambda one: -one[1][speed]))
    for place, row in enumerate(fastest.values()):
        colour = style.INK if row["method"] == "speculative" else _look(row["method"])["color"]
        bar: Any = {"xerr": style.sides([row], speed), "error_kw": {"elinewidth": 0.8}}
        axes.barh(place, row[speed], height=0.6, color=colour, ecolor=style.MUTED, **bar)
        text = f"{row['emitted_kl_per_token']:.2g} nats"
        style.label(axes, text, (0, place), "white", shift=(4, 0), fontsize=7.5)
    axes.set_yticks(range(len(fastest)), fastest, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(1, color=style.MUTED, lw=0.8, ls=":")
    first = next(iter(fastest.values()))
    axes.set_title(f"The fastest policy spends {first['emitted_kl_per_token']:.2g} nats")
    axes.set_xlabel("tokens a second, × plain decoding")


def _spec(row: Row) -> str:
    return row["method"] if row["knob"] is None else f"{row['method']}:{row['knob']}"


def _name(spec: str, between: str = "\n") -> str:
    """Return a policy's name and its knobs with three digits."""
    name, _, knobs = spec.partition(":")
    parts = [knob.partition("=")[::2] for knob in knobs.split(",") if knob]
    shown = [f"{'' if knob == name else knob} {_digits(value)}".strip() for knob, value in parts]
    return between.join([TITLES.get(name, name), *shown])


def _digits(value: str) -> str:
    try:
        return f"{float(value):.3g}"
    except ValueError:
        return value


def _look(name: str) -> dict[str, Any]:
    return style.look("band_price" if name == "band" else name).options(4.5)
