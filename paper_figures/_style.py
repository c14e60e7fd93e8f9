"""One look for all figures, and the two file formats they are saved in."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.axis import Axis  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
# Okabe and Ito's palette: told apart with any colour vision, and one colour per policy
COLOUR = {
    "speculative": INK,
    "band_price": "#0072B2",
    "band_delta": "#56B4E9",
    "cactus": "#D55E00",
    "cactus_exact": "#E69F00",
    "soft_band": "#CC79A7",
    "typical": "#009E73",
    "typical_target": "#009E73",
}
NAME = {
    "speculative": "speculative (lossless)",
    "band_price": "band, constant price",
    "band_delta": "band, constant δ",
    "cactus": "Cactus",
    "cactus_exact": "Cactus, exact root",
    "soft_band": "soft band",
    "typical": "typical",
    "typical_target": "typical, recovering from q",
}
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 8.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.visible": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "pdf.fonttype": 42,
    "svg.hashsalt": "cactus-theory",
}


def applied() -> AbstractContextManager[None]:
    """Return a context in which figures have this look, whatever the user's settings are."""
    settings: Any = {**matplotlib.rcParamsDefault, **SETTINGS, "backend": "Agg"}
    return plt.rc_context(settings)


def panels(
    columns: int, width: float = 7.2, height: float = 3.1, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` × ``height`` inches with panels side by side, row by row."""
    figure, grid = plt.subplots(rows, columns, figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.06)  # type: ignore[union-attr]
    return figure, list(grid.flat) if columns * rows > 1 else [grid]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV below its ``#`` lines: numbers as float, empty fields as None."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(lines)]


def columns(rows: Iterable[dict[str, Any]], *keys: str) -> list[list[Any]]:
    """Return the columns ``keys``, leaving out rows where one is empty."""
    whole = [[row[key] for key in keys] for row in rows]
    whole = [row for row in whole if None not in row]
    return [list(column) for column in zip(*whole, strict=True)] or [[] for _ in keys]


def label(ax: Axes, text: str, at: tuple[float, float], colour: str, **options: Any) -> None:
    """Write ``text`` in a line's colour at a data point, ``shift`` typographic points away."""
    shift = options.pop("shift", (4, 0))
    options = {"va": "center", "ha": "left", "fontsize": 8} | options
    ax.annotate(text, at, shift, textcoords="offset points", color=colour, **options)


def ticks(axis: Axis, values: Sequence[float], suffix: str = "") -> None:
    """Put ticks of a logarithmic axis at round ``values``, written out."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{suffix}"))


def save(figure: Figure, name: str, out: Path) -> list[Path]:
    """Save ``name``.pdf and ``name``.png (200 dpi), dateless: equal input gives equal bytes."""
    out.mkdir(parents=True, exist_ok=True)
    empty = {"Creator": None, "Producer": None, "CreationDate": None}
    paths = [out / f"{name}.pdf", out / f"{name}.png"]
    figure.savefig(paths[0], metadata=empty)
    figure.savefig(paths[1], dpi=200, metadata={"Software": None})
    plt.close(figure)
    return paths


def _value(text: str) -> Any:
    if text == "":
        return None
    try:
        return float(text)
    except ValueError:
        return text
