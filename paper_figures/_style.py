"""The style of all figures, helpers for drawing, and the saving of figures as PDF and PNG."""

import csv
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.axis import Axis  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

# folder of the plot style and the policies' looks, which the library's plots read, too
SHARED = Path(__file__).resolve().parent.parent / "cactus_theory" / "base"
Row = dict[str, Any]
# widths of figures in inches: a page, or one of two columns, in which panels are stacked
WIDTHS = {"page": 7.2, "column": 3.4}


@dataclass(frozen=True)
class Look:
    """The style of a policy in every figure; lines and markers also tell policies apart in grey."""

    colour: str
    line: Any
    marker: str
    name: str
    hollow: bool = False

    def options(self, size: float = 3.6) -> dict[str, Any]:
        """Return the keyword arguments of ``Axes.plot``."""
        face = "white" if self.hollow else self.colour
        point = {"marker": self.marker, "ms": size, "mfc": face}
        return {"color": self.colour, "ls": self.line} | point


def applied(width: str = "page") -> AbstractContextManager[None]:
    """Return a context with our plot settings, which do not depend on the user's settings."""
    size = (WIDTHS[width], 3.4)
    settings = matplotlib.rc_params_from_file(SHARED / "look.mplstyle", use_default_template=False)
    fixed: Any = {"backend": "Agg", "figure.figsize": size}
    if width == "column":
        fixed |= {"axes.titlesize": 8, "figure.titlesize": 8}
    return plt.rc_context({**matplotlib.rcParamsDefault, **settings, **fixed})


def narrow() -> bool:
    """Return whether figures are drawn for one column."""
    return plt.rcParams["figure.figsize"][0] <= WIDTHS["column"]


def panels(count: int, height: float = 3.4, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels of ``height`` inches, in rows or stacked in a column."""
    width = plt.rcParams["figure.figsize"][0]
    rows, columns = (count, 1) if narrow() else (rows, count // rows)
    size = width, height * (0.85 if narrow() else 1) * rows
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.06)  # type: ignore[union-attr]
    return figure, list(grid.flat)


def look(name: str) -> Look:
    """Return the look of a policy or of a series, with a default for unknown names."""
    return LOOKS.get(name, LOOKS["own" if ".py" in name else "other"])


def band_of(row: Row) -> str:
    """Return a row's policy; ``band_block`` is the band that block verification adapts to a path.

    The band of each row (``per_row``) is ``band`` also in a block.
    """
    name, _, knobs = str(row["policy"]).partition(":")
    paths = name == "band" and row["verifier"] == "block" and "per_row" not in knobs
    return "band_block" if paths else name


def path_look(key: tuple[str, str]) -> dict[str, Any]:
    """Return plot options for (policy from ``band_of``, verifier); a chain has hollow markers."""
    name, verifier = key
    options = look("band_price" if name == "band" else name).options()
    return options | ({"mfc": "white"} if verifier == "chain" else {})


def series(name: str, knob: Any) -> str:
    """Return the name of a policy's curve, such as ``band_price`` and ``band_delta`` for bands."""
    return f"{name}_{str(knob or '').partition('=')[0]}" if name == "band" else name


def read(path: Path) -> list[Row]:
    """Read the rows of a CSV without its ``#`` lines: numbers as float, empty fields as None."""
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
    """Return the columns ``keys``, without the rows in which one of these fields is empty."""
    whole = [[row[key] for key in keys] for row in rows]
    whole = [row for row in whole if None not in row]
    return [list(column) for column in zip(*whole, strict=True)] or [[] for _ in keys]


def curve(rows: Iterable[Row], *keys: str) -> list[list[Any]]:
    """Return the columns ``keys``, sorted by the first one."""
    return columns(sorted(rows, key=lambda row: row[keys[0]]), *keys)


def sides(rows: Iterable[Row], column: str) -> list[list[float]]:
    """Return the distances of ``_low`` and ``_high`` from the values, for error bars."""
    middle, low, high = ([row[f"{column}{end}"] for row in rows] for end in ("", "_low", "_high"))
    pairs = (middle, low), (high, middle)
    return [[max(0.0, a - b) for a, b in zip(*two, strict=True)] for two in pairs]


def fastest(rows: Iterable[Row], speed: str, key: Callable[[Row], Any]) -> dict[Any, Row]:
    """Return the fastest row for each key."""
    return {key(row): row for row in sorted(rows, key=lambda row: row[speed])}


def label(axes: Axes, text: str, at: tuple[float, float], colour: str, **options: Any) -> None:
    """Write ``text`` in a colour at a point, moved by ``shift``; to the left if shift[0] < 0."""
    shift = options.pop("shift", (4, 0))
    side = "right" if shift[0] < 0 else "left"
    options = {"va": "center", "ha": side, "fontsize": 8} | options
    axes.annotate(text, at, shift, textcoords="offset points", color=colour, **options)


def log_axis(axis: Axis, ticks: Sequence[float], name: str = "", unit: str = "") -> None:
    """Make an axis logarithmic, with a name and with plain numbers at the given ticks."""
    axes = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    if name:
        axis.set_label_text(name)
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def legend_below(figure: Figure, axes: Axes, across: int = 2) -> None:
    """Draw the legend of ``axes`` below all panels, with ``across`` names per line on a page."""
    handles, names = axes.get_legend_handles_labels()
    columns = 1 if narrow() else across
    place: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 7.5}
    figure.legend(handles, names, ncols=columns, **place)


def headline(figure: Figure, text: str) -> None:
    """Write a finding above all panels, in two lines in a column."""
    figure.suptitle(textwrap.fill(text, 48) if narrow() else text, x=0.01, ha="left")


def save(figure: Figure, name: str, out: Path) -> list[Path]:
    """Save ``name``.pdf and ``name``.png (200 dpi) atomically, without dates.

    Equal figures give equal bytes.
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
    try:
        return float(text)
    except ValueError:
        return text or None


LOOKS = _looks()
COLOUR = {key: look.colour for key, look in LOOKS.items()}
NAME = {key: look.name for key, look in LOOKS.items()}
INK, MUTED, GRID = (COLOUR[name] for name in ("speculative", "other", "grid"))
