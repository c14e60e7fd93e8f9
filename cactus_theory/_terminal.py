"""How results look in a terminal, with nothing but the standard library."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from typing import Any

ROUNDING = 1e-12  # shown as 0; the CSV keeps every digit
WORDS = ("policy", "method", "verifier", "knob", "declared budget", "", "proof of optimality")
GAP = "  "


def width_of_terminal(most: int) -> int:
    """Return the columns the terminal has (``COLUMNS`` counts), 80 if unknown, at most ``most``."""
    return min(most, shutil.get_terminal_size(fallback=(80, 24)).columns)


def rule(title: str, width: int = 80) -> str:
    """Return a line with a title in it."""
    return f"── {title} ".ljust(width, "─")


def aligned(lines: Sequence[Sequence[str]], words: Collection[int]) -> list[str]:
    """Return lines whose cells stand below each other, the columns ``words`` left, others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    placed = (
        [cell.ljust(width) if place in words else cell.rjust(width)
         for place, (cell, width) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )  # fmt: skip
    return [GAP.join(cells) for cells in placed]


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table whose cells are never cut; heads may have several lines, set at the bottom."""
    tall = max(head.count("\n") for head in heads) + 1
    tops = [[*[""] * tall, *head.split("\n")][-tall:] for head in heads]
    lines = [list(line) for line in zip(*tops, strict=True)] + [list(row) for row in rows]
    made = aligned(lines, [place for place, head in enumerate(heads) if head in WORDS])
    ruled = "─" * len(made[0])
    parts = [title] * bool(title) + [*made[:tall], ruled, *made[tall:]]
    return "\n".join(map(str.rstrip, parts))


def fitted(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, title: str = "") -> str:
    """Return the table without the last columns that would make it wider than ``width``."""
    for count in range(len(heads), 1, -1):
        made = text_table(heads[:count], [row[:count] for row in rows], title)
        if max(map(len, made.split("\n"))) <= width:
            return made
    return text_table(heads[:1], [row[:1] for row in rows], title)


def shown(value: Any) -> str:
    """Return a cell's text: four digits, a dash for what there is none of."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) < ROUNDING else f"{value:.4g}"
