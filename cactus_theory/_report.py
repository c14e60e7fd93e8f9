"""What the command line prints and saves: JSON, tables, CSV."""

import csv
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cactus_theory._files import write_whole

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
    if not path.endswith(".csv"):
        raise ValueError(f"--csv: must end in .csv; got {path!r}")
    arrays = _flat(columns)
    text = io.StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in notes.items())
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", *(name.replace(" ", "_") for name in arrays)])
    lines.writerows([row, *map(_exact, cells)] for row, cells in enumerate(zip(*arrays.values())))  # noqa: B905
    write_whole(path, text.getvalue().encode())


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
    widths = {name: max(12, len(name)) for name in arrays}
    line: Callable[[str, Callable[[str], str]], str] = lambda head, cell: "  ".join(  # noqa: E731
        [f"{head:>6}"] + [f"{cell(name):>{width}}" for name, width in widths.items()]
    )
    print(line("row", lambda name: name))
    for row in range(min(count, ROWS_SHOWN)):
        print(line(str(row), lambda name, row=row: _cell(arrays[name][row])))
    if count > ROWS_SHOWN:
        print(f"   … {count - ROWS_SHOWN} more rows (--json prints all, --csv saves all)")
    print(line("mean", lambda name: _cell(arrays[name].astype(float).mean())))


def _cell(value: Any) -> str:
    return str(bool(value)) if isinstance(value, bool | np.bool_) else f"{float(value):.6g}"


def _exact(value: Any) -> str:
    return str(bool(value)) if isinstance(value, bool | np.bool_) else repr(float(value))
