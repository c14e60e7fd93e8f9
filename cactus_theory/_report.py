"""What the command line prints and saves: JSON, tables, CSV."""

import json
import math
from typing import Any

import numpy as np
import torch

from cactus_theory._tables import save_table
from cactus_theory._terminal import aligned

# a longer table would scroll the summary off a terminal
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
    _print_table(arrays, count)


def save_csv(path: str, columns: Columns, notes: dict[str, Any]) -> None:
    """Write one line per row under ``# key: value`` lines, all of the file or nothing."""
    arrays = _flat(columns)
    heads = ["row", *(name.replace(" ", "_") for name in arrays)]
    count = max(map(len, arrays.values()))
    lines = zip(range(count), *(map(_exact, own) for own in arrays.values()), strict=True)
    save_table(path, [dict(zip(heads, line, strict=True)) for line in lines], notes)


def _flat(columns: Columns) -> dict[str, np.ndarray]:
    return {name: np.atleast_1d(np.asarray(value)).reshape(-1) for name, value in columns.items()}


def plain_json(value: Any) -> Any:
    """Return ``value`` for JSON; infinities and NaN become strings, as JSON has none."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _print_table(arrays: dict[str, np.ndarray], count: int) -> None:
    columns = [
        [name.rjust(12), *map(_cell, own[:ROWS_SHOWN]), _cell(own.astype(float).mean())]
        for name, own in arrays.items()
    ]
    shown = [str(row) for row in range(min(count, ROWS_SHOWN))]
    lines = aligned([*zip(["row".rjust(6), *shown, "mean"], *columns, strict=True)], ())
    print("\n".join(lines[:-1]))
    if count > ROWS_SHOWN:
        print(f"   … {count - ROWS_SHOWN} more rows (--json prints all, --csv saves all)")
    print(lines[-1])


def _cell(value: Any) -> str:
    return str(bool(value)) if isinstance(value, bool | np.bool_) else f"{float(value):.6g}"


def _exact(value: Any) -> str:
    return str(bool(value)) if isinstance(value, bool | np.bool_) else repr(float(value))
