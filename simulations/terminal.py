"""How results look in a terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

ROUNDING = 1e-12  # shown as 0; the CSV keeps every digit
WORDS = ("policy", "method", "knob", "declared budget", "", "proof of optimality")


def empty_table(*heads: str) -> Table:
    """Return a table whose cells are never cut."""
    table = Table(box=SIMPLE_HEAD, title_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in WORDS else "right", no_wrap=True)
    return table


def shown(value: Any) -> str:
    """Return a cell's text: four digits, a dash for what there is none of."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return str(value)
    return "0" if abs(value) < ROUNDING else f"{value:.4g}"
