"""What every command does beside its own work: say how results came about, write, show tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .inputs import command_line
from .results import provenance, write_csv
from .terminal import shown, text_table

# flags that say where results go and how they are shown: none of them decides a result
PLACES = ("out", "publish", "work", "save_trace", "set_aside_damaged", "json", "shared")


def made(args: argparse.Namespace, **notes: str) -> dict[str, str]:
    """Return the provenance of what a command writes, and notes of its own.

    ``args`` as ``python -m simulations`` parses them, with the command's name and its flags.
    """
    return provenance(command_line(args.command, args.declare, args, PLACES)) | notes


def publish(
    args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], *paths: Path | None, **notes: str
) -> None:
    """Write a table with its provenance to every path that is one, to ``--out`` if none is given.

    Raises
    ------
    ValueError
        As :func:`simulations.common.results.write_csv`.
    """
    source = made(args, **notes)
    for path in filter(None, paths or (args.out,)):
        write_csv(path, rows, source)


def columns(rows: Sequence[Mapping[str, Any]], heads: Mapping[str, str], title: str = "") -> str:
    """Return some columns of a table for the terminal: column → its head."""
    cells = [[shown(row[name]) for name in heads] for row in rows]
    return text_table(list(heads.values()), cells, title)
