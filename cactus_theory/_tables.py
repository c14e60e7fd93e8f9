"""Tables of lines that share their columns: on the terminal, as CSV, as LaTeX."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cactus_theory._files import write_whole
from cactus_theory._terminal import aligned

Cells = Sequence[str]
PLUS_MINUS = " ±"
# what LaTeX reads as commands, and what it has as mathematics
ESCAPED = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"$<$", ">": r"$>$", "±": r"$\pm$", "δ": r"$\delta$", "∞": r"$\infty$",
}  # fmt: skip


def both(value: float, error: float) -> str:
    """Return a number with its standard error, if there is one."""
    shown = f"{value:.4f}"
    return shown if math.isnan(error) else f"{shown}{PLUS_MINUS}{error:.4f}"


def print_table(heads: Cells, lines: Sequence[Cells], words: Sequence[int]) -> None:
    """Print a table; the columns ``words`` are set left, the others right."""
    for line in aligned([heads, *lines], words):
        print(line.rstrip())


def save_table(path: str, lines: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> None:
    """Write one line each under ``# key: value`` lines, floats in full: all of it or nothing.

    Raises
    ------
    ValueError, OSError
        Another suffix than .csv; a file that cannot be written.
    """
    if not path.endswith(".csv"):
        raise ValueError(f"--csv: must end in .csv; got {path!r}")
    write_csv(path, list(lines[0]), lines, notes)


def write_csv(
    path: str | Path,
    columns: Cells,
    lines: Iterable[Mapping[str, Any]],
    notes: Mapping[str, Any],
) -> None:
    """Write a header and the lines under ``# key: value`` lines: all of the file or nothing.

    What a line lacks, and ``None``, becomes an empty field.

    Raises
    ------
    ValueError, OSError
        A note of several lines, a column that is none; a file that cannot be written.
    """
    text = io.StringIO()
    for key, value in notes.items():
        if "\n" in f"{key}{value}":
            raise ValueError(f"provenance: entries must be one line; got {key!r}: {value!r}")
        text.write(f"# {key}: {value}\n")
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    write_whole(path, text.getvalue().encode())


def save_latex(
    path: str, heads: Cells, lines: Sequence[Cells], words: Sequence[int], note: str
) -> None:
    r"""Write a tabular that needs no package, for ``\input``; ``note`` becomes a comment.

    Raises
    ------
    ValueError, OSError
        Another suffix than .tex; a file that cannot be written.
    """
    if not path.endswith(".tex"):
        raise ValueError(f"--latex: must end in .tex; got {path!r}")
    columns = "".join("l" if place in words else "r" for place in range(len(heads)))
    body = [f"% {note}", rf"\begin{{tabular}}{{{columns}}}", r"\hline", _row(heads), r"\hline"]
    body += [*map(_row, lines), r"\hline", r"\end{tabular}", ""]
    write_whole(path, "\n".join(body).encode())


def _row(cells: Cells) -> str:
    parts = ("<=".join(map(_escaped, cell.split("<="))).replace("<=", r"$\le$") for cell in cells)
    return " & ".join(parts) + r" \\"


def _escaped(text: str) -> str:
    return "".join(ESCAPED.get(letter, letter) for letter in text)
