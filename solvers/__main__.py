"""``python -m solvers PROGRAM …``: solve one convex program on rows from files.

When installed from the wheel, the command is ``python -m cactus_theory.solvers``.

A row without an answer is named on stderr and in the output, and the other rows are solved.
Exit code 0: every row is solved; 1: some row is not; 2: bad input, or no row could be solved.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from cactus_theory.base.terminal import INTERRUPTED, REPORTED, ends_quietly, importing

COMMAND = f"python -m {__package__}"

with importing(COMMAND):
    import numpy as np

    from cactus_theory.base.arguments import refuse_empty
    from cactus_theory.base.help_pages import add_commands
    from cactus_theory.base.tables import plain_json
    from cactus_theory.base.terminal import interrupted, one_line

    from ._commands import COMMANDS, Job


@dataclasses.dataclass(frozen=True)
class Failed:
    """The result of a row that has no answer, with the reason."""

    error: str


def failures(results: Sequence[Any]) -> dict[int, Failed]:
    return {row: result for row, result in enumerate(results) if isinstance(result, Failed)}


def show(program: str, results: Sequence[Any], as_json: bool) -> None:
    """Print the results as one JSON object, or as a list of names and numbers for each row."""
    if as_json:
        rows = [plain_json(_fields(result)) for result in results]
        answer = {"program": program, "rows": rows, "failed": list(failures(results))}
        print(json.dumps(answer, allow_nan=False))
        return
    for index, result in enumerate(results):
        if len(results) > 1:
            print(f"row {index}")
        fields = _fields(result)
        width = max(11, *map(len, fields))
        print(*(f"{name:<{width}} {_text(value)}" for name, value in fields.items()), sep="\n")


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=6, threshold=16, max_line_width=10_000)
    if isinstance(value, dict):  # prices by constraint and token; prices of 0 are left out
        shown = (f"{key}: {_text(price)}" for key, price in value.items() if price != 0)
        return f"{{{', '.join(shown)}}}"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _fields(result: Any) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog=COMMAND, description=__doc__)
    groups = {"Solve": COMMANDS}
    add_commands(parser, groups, lambda name, command: COMMANDS[name].arguments(command), "PROGRAM")
    return parser


def _solved(jobs: Iterable[Job], results: list[Any]) -> bool:
    """Call each job, append its answer or failure to ``results``; return False if interrupted."""
    try:
        for job in jobs:
            try:
                results.append(job())
            except REPORTED as error:
                results.append(Failed(one_line(error)))
    except KeyboardInterrupt:
        return False
    return True


def _report(args: argparse.Namespace) -> int:
    results: list[Any] = []
    finished = _solved(COMMANDS[args.program].solve(args), results)
    failed = failures(results)
    if failed and len(failed) == len(results):
        more = f" (no answer on any of {len(results)} rows)" if len(results) > 1 else ""
        raise RuntimeError(f"{failed[0].error}{more}")
    show(args.program, results, args.json)
    for row, failure in failed.items():
        print(f"{COMMAND} {args.program}: row {row}: {failure.error}", file=sys.stderr)
    return bool(failed) if finished else INTERRUPTED


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        refuse_empty(sys.argv[1:] if arguments is None else arguments)
        return _report(args)
    except KeyboardInterrupt:
        return interrupted(f"{COMMAND} {args.program}")
    except REPORTED as error:
        print(f"{COMMAND} {args.program}: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
