"""``python -m solvers PROGRAM …``: solve one convex program on rows from files."""

import argparse
import dataclasses
import json
import math
import sys
from typing import Any, NoReturn

import numpy as np

from cactus_theory._pipes import ends_quietly
from solvers._commands import COMMANDS


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="python -m solvers", description=__doc__)
    commands = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.about, description=command.about))
    return parser


def _plain(value: Any) -> Any:
    """Return a JSON value; JSON has no infinity, so it is the string "inf"."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=6, threshold=16, max_line_width=10_000)
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _fields(result: Any) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def _show(program: str, results: list[Any], as_json: bool) -> None:
    if as_json:
        rows = [_plain(_fields(result)) for result in results]
        print(json.dumps({"program": program, "rows": rows}, allow_nan=False))
        return
    for index, result in enumerate(results):
        if len(results) > 1:
            print(f"row {index}")
        print(result.report() if hasattr(result, "report") else _listing(result))


def _listing(result: Any) -> str:
    fields = _fields(result)
    width = max(11, *map(len, fields))
    return "\n".join(f"{name:<{width}} {_text(value)}" for name, value in fields.items())


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        results = list(COMMANDS[args.program].solve(args))
    except (ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError) as error:
        print(f"python -m solvers {args.program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    _show(args.program, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
