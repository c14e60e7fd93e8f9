"""One look for all figures, names beside points, and the two file formats they are saved in."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.axis import Axis  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

# the look of policies and of everything else, which the library's own plots have, too
SHARED = Path(__file__).resolve().parent.parent / "cactus_theory" / "base"
Row = dict[str, Any]
# inches: across a page, and in one of two columns, where panels stand below each other
WIDTHS = {"page": 7.2, "column": 3.4}


@dataclass(frozen=True)
class Look:
    """How a policy is drawn in every figure; line and marker tell it apart without colour."""

    colour: str
    line: Any
    marker: str
    name: str
    hollow: bool = False

    def options(self, size: float = 3.6) -> dict[str, Any]:
        """Return what ``Axes.plot`` takes."""
        face = "white" if self.hollow else self.colour
        point = {"marker": self.marker, "ms": size, "mfc": face}
        return {"color": self.colour, "ls": self.line} | point


def applied(width: str = "page") -> AbstractContextManager[None]:
    """Return a context in which figures have this look, whatever the user's settings are."""
    size = (WIDTHS[width], 3.4)
    settings = matplotlib.rc_params_from_file(SHARED / "look.mplstyle", use_default_template=False)
    fixed: Any = {"backend": "Agg", "figure.figsize": size}
    return plt.rc_context({**matplotlib.rcParamsDefault, **settings, **fixed})


def narrow() -> bool:
    """Return whether figures are drawn for one column."""
    return plt.rcParams["figure.figsize"][0] <= WIDTHS["column"]


def panels(count: int, height: float = 3.4, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels of ``height`` inches in rows, or stacked in a column."""
    width = plt.rcParams["figure.figsize"][0]
    rows, columns = (count, 1) if narrow() else (rows, count // rows)
    size = width, height * (0.85 if narrow() else 1) * rows
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.06)  # type: ignore[union-attr]
    return figure, list(grid.flat)


def look(name: str) -> Look:
    """Return how a policy, or a series of its knob, is drawn."""
    return LOOKS.get(name, LOOKS["own" if ".py" in name else "other"])


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV below its ``#`` lines: numbers as float, empty fields as None."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(lines)]


def _looks() -> dict[str, Look]:
    looks = {}
    for row in read(SHARED / "looks.csv"):
        start, *dashes = row["line"].split()
        line = (int(start), tuple(map(int, dashes))) if dashes else start
        marker, name, hollow = row["marker"] or "", row["name"] or "", row["hollow"] == "yes"
        looks[row["policy"]] = Look(row["colour"], line, marker, name, hollow)
    return looks


def columns(rows: Iterable[Row], *keys: str) -> list[list[Any]]:
    """Return the columns ``keys``, leaving out rows where one is empty."""
    whole = [[row[key] for key in keys] for row in rows]
    whole = [row for row in whole if None not in row]
    return [list(column) for column in zip(*whole, strict=True)] or [[] for _ in keys]


def curve(rows: Iterable[Row], *keys: str) -> list[list[Any]]:
    """Return the same columns, in order of the first."""
    return columns(sorted(rows, key=lambda row: row[keys[0]]), *keys)


def label(axes: Axes, text: str, at: tuple[float, float], colour: str, **options: Any) -> None:
    """Write ``text`` in a line's colour at a data point, ``shift`` typographic points away."""
    shift = options.pop("shift", (4, 0))
    options = {"va": "center", "ha": "left", "fontsize": 8} | options
    axes.annotate(text, at, shift, textcoords="offset points", color=colour, **options)


def log_axis(axis: Axis, ticks: Sequence[float], name: str = "", unit: str = "") -> None:
    """Make an axis logarithmic, with its name and ticks at round values, written out."""
    axes = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    if name:
        axis.set_label_text(name)
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def legend_below(figure: Figure, axes: Axes, across: int = 2) -> None:
    """Name what is drawn in ``axes`` below all panels, ``across`` names a line of a page."""
    handles, names = axes.get_legend_handles_labels()
    columns = 1 if narrow() else across
    place: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 7.5}
    figure.legend(handles, names, ncols=columns, **place)


def save(figure: Figure, name: str, out: Path) -> list[Path]:
    """Save ``name``.pdf and ``name``.png (200 dpi), dateless: equal input gives equal bytes.

    Each is there whole or as it was before.
    """
    out.mkdir(parents=True, exist_ok=True)
    empty = {"Creator": None, "Producer": None, "CreationDate": None}
    options = {"pdf": {"metadata": empty}, "png": {"dpi": 200, "metadata": {"Software": None}}}
    paths = []
    for kind, settings in options.items():
        paths.append(out / f"{name}.{kind}")
        unfinished = out / f".{name}.{kind}"
        figure.savefig(unfinished, format=kind, **settings)
        unfinished.replace(paths[-1])
    plt.close(figure)
    return paths


def _value(text: str) -> Any:
    if text == "":
        return None
    try:
        return float(text)
    except ValueError:
        return text


LOOKS = _looks()
COLOUR = {key: look.colour for key, look in LOOKS.items()}
NAME = {key: look.name for key, look in LOOKS.items()}
INK, MUTED, GRID = (COLOUR[name] for name in ("speculative", "other", "grid"))


# directions tried, first the usual ones, and distances in typographic points
ANGLES = (0, 180, *(sign * (base + step) for step in range(15, 91, 15)
                    for base, sign in ((0, 1), (0, -1), (90, 1), (90, -1))))  # fmt: skip
DISTANCES = (5.0, 8.0, 12.0, 18.0, 26.0, 36.0, 48.0)
# from here on a thin line leads to the point
FAR = 12.0
# pixels around a text that stay free
PADDING = 1.5
# what a covered text, a text over a point of a line, and one outside the axes cost, in distances
OVER_TEXT, OVER_INK, OUTSIDE = 1e4, 6.0, 1e5
# a marker counts for so many points of a line, in its middle and half its size around, in pixels
WEIGHT = 4
HALF_A_MARK = [(x, y) for x in (-3, 0, 3) for y in (-3, 0, 3)]
# points of a line looked at per segment
SAMPLES = 24


@dataclass(frozen=True)
class PointName:
    """A text, the data point it belongs to, and its colour."""

    text: str
    at: tuple[float, float]
    colour: str


def place_names(panels: Mapping[Axes, Sequence[PointName]], fontsize: float = 7.0) -> None:
    """Write every name near its point in its panel; call it once, when all else is drawn."""
    figure = next(iter(panels)).figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    for axes, names in panels.items():
        ink, taken = _ink(axes), _texts(axes)
        for name in names:
            taken.append(_placed(axes, name, fontsize, ink, taken))


def _placed(
    axes: Axes, name: PointName, fontsize: float, ink: np.ndarray, taken: Sequence[Bbox]
) -> Bbox:
    """Write one name and return the place it takes."""
    look: Any = {"color": name.colour, "ha": "center", "va": "center", "fontsize": fontsize}
    note = axes.annotate(name.text, name.at, (0, 0), textcoords="offset points", **look)
    shift, distance, box = _best(axes, _box(note), ink, taken)
    note.remove()
    lead = {"arrowstyle": "-", "color": name.colour, "lw": 0.5, "shrinkA": 0, "shrinkB": 2}
    look["arrowprops"] = lead if distance >= FAR else None
    note = axes.annotate(name.text, name.at, shift, textcoords="offset points", **look)
    note.set_in_layout(False)
    return box


def _best(
    axes: Axes, box: Bbox, ink: np.ndarray, taken: Sequence[Bbox]
) -> tuple[tuple[float, float], float, Bbox]:
    """Return the shift and its distance in points, and the text's place, at the least cost."""
    scale = axes.figure.dpi / 72
    places = []
    for order, (distance, angle) in enumerate((d, a) for d in DISTANCES for a in ANGLES):
        x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        shift = (
            x * distance + np.sign(round(x, 9)) * box.width / scale / 2,
            y * distance + np.sign(round(y, 9)) * box.height / scale / 2,
        )
        moved = box.translated(shift[0] * scale, shift[1] * scale).padded(PADDING)
        cost = distance + 1e-3 * order + _cost(axes, moved, ink, taken)
        places.append((cost, order, shift, distance, moved))
    _, _, shift, distance, moved = min(places, key=lambda place: place[:2])
    return (float(shift[0]), float(shift[1])), distance, moved


def _cost(axes: Axes, box: Bbox, ink: np.ndarray, taken: Iterable[Bbox]) -> float:
    frame = axes.get_window_extent()
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    texts = sum(box.overlaps(other) for other in taken)
    (x0, y0), (x1, y1) = box.min, box.max
    covers = (ink[:, 0] > x0) & (ink[:, 0] < x1) & (ink[:, 1] > y0) & (ink[:, 1] < y1)
    return OUTSIDE * (not inside) + OVER_TEXT * texts + OVER_INK * int(covers.sum())


def _ink(axes: Axes) -> np.ndarray:
    """Return pixels of what is drawn: points along lines, and the rims of scattered discs."""
    parts = [np.empty((0, 2))]
    for line in axes.lines:
        points = line.get_transform().transform(line.get_xydata())
        marks = points if line.get_marker() not in ("", "None", None) else points[:0]
        parts += [_along(points), *[marks + side for side in HALF_A_MARK for _ in range(WEIGHT)]]
    turn = np.linspace(0, 2 * math.pi, 12, endpoint=False)
    for cloud in axes.collections:
        places = np.asarray(cloud.get_offsets())
        sizes = getattr(cloud, "get_sizes", lambda: [0.0])()
        if not len(places) or not len(sizes):
            continue
        radii = np.sqrt(np.resize(sizes, len(places))) / 2 * axes.figure.dpi / 72
        centres = cloud.get_offset_transform().transform(places)
        for share in (0.0, 0.5, 1.0):
            rim = share * np.stack([np.cos(turn), np.sin(turn)], -1)
            parts.append((centres[:, None] + radii[:, None, None] * rim).reshape(-1, 2))
    return np.concatenate(parts)


def _along(points: np.ndarray) -> np.ndarray:
    points = points[np.isfinite(points).all(-1)]
    if len(points) < 2:
        return points
    steps = np.linspace(0, 1, SAMPLES)[None, :, None]
    return (points[:-1, None] + steps * np.diff(points, axis=0)[:, None]).reshape(-1, 2)


def _texts(axes: Axes) -> list[Bbox]:
    """Return where texts and the legend are."""
    taken = [_box(text) for text in axes.texts if text.get_text()]
    legend = axes.get_legend()
    return taken if legend is None else [*taken, legend.get_window_extent()]


def _box(text: Any) -> Bbox:
    return text.get_window_extent(text.figure.canvas.get_renderer())
