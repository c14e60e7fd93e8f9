"""Write the results of simulations, atomically and with their provenance, and format tables."""

import argparse
import csv
import importlib.metadata
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base import tables
from cactus_theory.base.files import write_whole
from cactus_theory.base.provenance import provenance
from cactus_theory.base.tables import fitted, shown, text_table, width_of_terminal
from cactus_theory.traces.estimate import Estimate, valued

from .inputs import command_line

# most columns of a terminal that tables use
WIDEST = 120
# digits kept of a float: enough to compare, few enough to hide the rounding of a sum
DIGITS = 12


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_csv(
    path: str | Path, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write rows as CSV below ``# key: value`` lines of provenance, atomically.

    Columns are in the first row's order; ``None`` becomes an empty field, floats keep 12 digits.
    Raises ValueError for no rows, rows of different columns, a provenance entry of several lines.
    """
    if not rows:
        raise ValueError("rows: must hold at least one row; got none")
    columns = list(rows[0])
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(f"rows: must share the columns {columns}; row {index} has {list(row)}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    fields = [
        {name: f"{x:.{DIGITS}g}" if isinstance(x, float) else x for name, x in row.items()}
        for row in rows
    ]
    tables.write_csv(path, fields, provenance)


def read_csv(path: str | Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the rows, fields as text, and the provenance of a file from :func:`write_csv`."""
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    parts = (line[2:].partition(": ") for line in lines[:count])
    return list(csv.DictReader(lines[count:])), {key: value for key, _, value in parts}


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_tensors(path: str | Path, content: Any) -> None:
    """Write a file for ``torch.load``, atomically."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: str | Path, content: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


# flags that only say where results go and how they are shown; no result depends on these
PLACES = ("out", "work", "json", "shared", "workers", "scheduler")


def publish(
    args: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    path: Path | None = None,
    /,
    **notes: str,
) -> None:
    """Write a table and its provenance, by default to ``--out``; ``notes`` add to the provenance.

    ``args`` are as in :func:`command_line`.
    """
    write_csv(path or args.out, rows, provenance(command_line(args, PLACES)) | notes)


SMALL = ".3g"  # format with three significant digits
ENDS = "", "_low", "_high"  # suffixes of a value and of the ends of its interval


def number(value: Any, digits: int | str) -> str:
    """Format a number, or a field of a CSV file; return an empty text for no value."""
    style = f",.{digits}f" if isinstance(digits, int) else digits
    return "" if value in ("", None) else format(float(value), style)


@dataclass(frozen=True)
class Column:
    """A column of a table, for the pages and the terminal.

    Attributes
    ----------
    head : the column's head.
    of : the name of the field to show, or a function from a row to the cell's text.
    digits : decimal digits of the field on a page, or a format.
    interval : whether the field's ``_low`` and ``_high`` follow in brackets.
    """

    head: str
    of: str | Callable[[Any], str]
    digits: int | str = SMALL
    interval: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row's cell on a page."""
        if callable(self.of):
            return self.of(row)
        if not self.interval:
            return number(row[self.of], self.digits)
        middle, low, high = (number(row[f"{self.of}{end}"], self.digits) for end in ENDS)
        return f"{middle} ({low}–{high})" if low else middle

    @property
    def short(self) -> str:
        """Return the head for the terminal, in several lines."""
        return textwrap.fill(self.head, 10)


def estimates(**values: Estimate | None) -> dict[str, float | None]:
    """Return estimates as columns, each with its standard error under ``NAME_se``."""
    return {key: own for name, one in values.items() for key, own in valued(name, one).items()}


def values_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the columns of rows without standard errors, as column → head."""
    names = [name for name in rows[0] if not name.endswith("_se")]
    return {name: name.replace("_", " ") for name in names}


def columns(
    rows: Sequence[Mapping[str, Any]],
    heads: Mapping[str, str],
    title: str = "",
    needed: str | None = None,
) -> str:
    """Return a table for the terminal; ``heads`` are column → head.

    If the table is too wide, columns after the column ``needed`` are left out.
    """
    cells, words = [[shown(row[name]) for name in heads] for row in rows], list(heads.values())
    if needed is None:
        return text_table(words, cells, title)
    return fitted(words, cells, width_of_terminal(WIDEST), title, list(heads).index(needed) + 1)
