"""Tables: lines with common columns, printed on the terminal or written as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from cactus_theory.base.files import write_whole

Cells = Sequence[str]


def print_table(heads: Cells, lines: Sequence[Cells], left: Sequence[int] = ()) -> None:
    """Print a table with columns aligned right, except those numbered in ``left``."""
    for line in aligned([heads, *lines], left):
        print(line.rstrip())


def write_csv(
    path: str | Path, lines: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]
) -> None:
    """Write ``# key: value`` lines, a header and the lines to a CSV: the whole file or nothing.

    The columns are those of the first line. Missing values and ``None`` become empty fields; floats
    have all digits. ValueError for a note of several lines, and for a column not in the first line.
    """
    text = io.StringIO()
    for key, value in notes.items():
        if "\n" in f"{key}{value}":
            raise ValueError(f"provenance: entries must be one line; got {key!r}: {value!r}")
        text.write(f"# {key}: {value}\n")
    table = csv.DictWriter(text, list(lines[0]), restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write_whole(path, text.getvalue().encode())


ROUNDING = 1e-12  # smaller magnitudes are shown as 0; the CSV keeps every digit
WORDS = ("policy", "method", "verifier", "knob", "declared budget", "", "proof of optimality")
GAP = "  "


def width_of_terminal(most: int) -> int:
    """Return the terminal's columns (or ``COLUMNS``), at most ``most``; by default ``most``."""
    return min(most, shutil.get_terminal_size(fallback=(most, 24)).columns)


def rule(title: str, width: int = 80) -> str:
    """Return a horizontal line with a title in it."""
    return f"── {title} ".ljust(width, "─")


def aligned(lines: Sequence[Sequence[str]], words: Collection[int]) -> list[str]:
    """Return lines with aligned cells: columns ``words`` to the left, others to the right."""
    placed = list[list[str]]()
    for place, column in enumerate(zip(*lines, strict=True)):
        side, width = str.ljust if place in words else str.rjust, max(map(len, column))
        placed.append([side(cell, width) for cell in column])
    return [GAP.join(cells) for cells in zip(*placed, strict=True)]


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table whose cells are never cut; heads of several lines align at the bottom."""
    tall = max(head.count("\n") for head in heads) + 1
    tops = [[*[""] * tall, *head.split("\n")][-tall:] for head in heads]  # empty lines on top
    lines = [list(line) for line in zip(*tops, strict=True)] + [list(row) for row in rows]
    table = aligned(lines, [place for place, head in enumerate(heads) if head in WORDS])
    parts = [*table[:tall], "─" * len(table[0]), *table[tall:]]
    if title:
        parts.insert(0, title)
    return "\n".join(map(str.rstrip, parts))


def fitted(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    title: str = "",
    needed: int = 1,
) -> str:
    """Return the table without the last columns that would make it wider than ``width``.

    The first ``needed`` columns always stay, even if the table is then wider than ``width``. So a
    caller can keep columns that a reader must see, such as nats.
    """
    count = fitting_columns(heads, rows, width, title, needed)
    return text_table(heads[:count], [row[:count] for row in rows], title)


def fitting_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, title: str, needed: int
) -> int:
    """Return how many of the first columns fit into ``width``, at least ``needed``."""
    for count in range(len(heads), needed, -1):
        table = text_table(heads[:count], [row[:count] for row in rows], title)
        if max(map(len, table.split("\n"))) <= width:
            return count
    return needed


def shown(value: Any) -> str:
    """Return a cell's text: four digits, a dash where there is no value."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) < ROUNDING else f"{value:.4g}"


# most rows of a printed table: more rows would scroll the summary off a terminal
ROWS_SHOWN = 20
Columns = dict[str, Any]


def print_json(payload: dict[str, Any]) -> int:
    """Print one JSON object; return exit code 0."""
    print(json.dumps(plain_json(payload)))
    return 0


def print_rows(columns: Columns) -> None:
    """Print named per-row values: one row as a list, a batch as a table with its mean."""
    arrays = _flat(columns)
    count = len(next(iter(arrays.values())))
    if count == 1:
        for name, value in arrays.items():
            print(f"  {name:<30} {_cell(value[0])}")
        return
    cells = [
        [name.rjust(12), *map(_cell, column[:ROWS_SHOWN]), _cell(column.astype(float).mean())]
        for name, column in arrays.items()
    ]
    labels = ["row".rjust(6), *map(str, range(min(count, ROWS_SHOWN))), "mean"]
    *lines, means = aligned([*zip(labels, *cells, strict=True)], ())
    if count > ROWS_SHOWN:
        lines.append(f"   … {count - ROWS_SHOWN} more rows (--json prints all, --csv saves all)")
    print("\n".join([*lines, means]))


def save_csv(path: str, columns: Columns, notes: dict[str, Any]) -> None:
    """Write a CSV with a line for each row under ``# key: value`` notes: all of it or nothing."""
    arrays = _flat(columns)
    heads = ["row", *(name.replace(" ", "_") for name in arrays)]
    lines = enumerate(zip(*(column.tolist() for column in arrays.values()), strict=True))
    write_csv(path, [dict(zip(heads, (row, *line), strict=True)) for row, line in lines], notes)


def _flat(columns: Columns) -> dict[str, np.ndarray]:
    return {name: np.atleast_1d(np.asarray(value)).reshape(-1) for name, value in columns.items()}


def plain_json(value: Any) -> Any:
    """Return ``value`` for JSON; infinities and NaN become strings, as JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in cast(list[Any], value)]
    if hasattr(value, "tolist"):  # a number or an array of numpy, a tensor
        return plain_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(value: Any) -> str:
    return f"{value}" if isinstance(value, bool | np.bool_) else f"{float(value):.6g}"
