"""Put names beside points where they cover neither each other nor what is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

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
class Name:
    """A text, the data point it belongs to, and its colour."""

    text: str
    at: tuple[float, float]
    colour: str


def place(wanted: Mapping[Axes, Sequence[Name]], fontsize: float = 7.0) -> None:
    """Write every name near its point in its panel; call it once, when all else is drawn."""
    figure = next(iter(wanted)).figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    for ax, names in wanted.items():
        ink, taken = _ink(ax), _texts(ax)
        for name in names:
            taken.append(_placed(ax, name, fontsize, ink, taken))


def _placed(ax: Axes, name: Name, fontsize: float, ink: np.ndarray, taken: Sequence[Bbox]) -> Bbox:
    """Write one name and return the place it takes."""
    look: Any = {"color": name.colour, "ha": "center", "va": "center", "fontsize": fontsize}
    note = ax.annotate(name.text, name.at, (0, 0), textcoords="offset points", **look)
    shift, distance, box = _best(ax, _box(note), ink, taken)
    note.remove()
    lead = {"arrowstyle": "-", "color": name.colour, "lw": 0.5, "shrinkA": 0, "shrinkB": 2}
    look["arrowprops"] = lead if distance >= FAR else None
    note = ax.annotate(name.text, name.at, shift, textcoords="offset points", **look)
    note.set_in_layout(False)
    return box


def _best(
    ax: Axes, box: Bbox, ink: np.ndarray, taken: Sequence[Bbox]
) -> tuple[tuple[float, float], float, Bbox]:
    """Return the shift and its distance in points, and the text's place, at the least cost."""
    scale = ax.figure.dpi / 72
    found = []
    for order, (distance, angle) in enumerate((d, a) for d in DISTANCES for a in ANGLES):
        x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        shift = (
            x * distance + np.sign(round(x, 9)) * box.width / scale / 2,
            y * distance + np.sign(round(y, 9)) * box.height / scale / 2,
        )
        own = box.translated(shift[0] * scale, shift[1] * scale).padded(PADDING)
        cost = distance + 1e-3 * order + _cost(ax, own, ink, taken)
        found.append((cost, order, shift, distance, own))
    _, _, shift, distance, own = min(found, key=lambda one: one[:2])
    return (float(shift[0]), float(shift[1])), distance, own


def _cost(ax: Axes, own: Bbox, ink: np.ndarray, taken: Iterable[Bbox]) -> float:
    frame = ax.get_window_extent()
    inside = frame.x0 <= own.x0 and own.x1 <= frame.x1 and frame.y0 <= own.y0 and own.y1 <= frame.y1
    covered = sum(own.overlaps(other) for other in taken)
    (x0, y0), (x1, y1) = own.min, own.max
    hit = (ink[:, 0] > x0) & (ink[:, 0] < x1) & (ink[:, 1] > y0) & (ink[:, 1] < y1)
    return OUTSIDE * (not inside) + OVER_TEXT * covered + OVER_INK * int(hit.sum())


def _ink(ax: Axes) -> np.ndarray:
    """Return pixels of what is drawn: points along lines, and the rims of scattered discs."""
    parts = [np.empty((0, 2))]
    for line in ax.lines:
        points = line.get_transform().transform(line.get_xydata())
        marks = points if line.get_marker() not in ("", "None", None) else points[:0]
        parts += [_along(points), *[marks + side for side in HALF_A_MARK for _ in range(WEIGHT)]]
    turn = np.linspace(0, 2 * math.pi, 12, endpoint=False)
    for cloud in ax.collections:
        places = np.asarray(cloud.get_offsets())
        sizes = getattr(cloud, "get_sizes", lambda: [0.0])()
        if not len(places) or not len(sizes):
            continue
        radii = np.sqrt(np.resize(sizes, len(places))) / 2 * ax.figure.dpi / 72
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


def _texts(ax: Axes) -> list[Bbox]:
    """Return where texts and the legend are."""
    taken = [_box(text) for text in ax.texts if text.get_text()]
    legend = ax.get_legend()
    return taken if legend is None else [*taken, legend.get_window_extent()]


def _box(text: Any) -> Bbox:
    return text.get_window_extent(text.figure.canvas.get_renderer())
