"""``python -m solvers PROGRAM …``: solve one convex program on rows from files.

Installed from the wheel, it is ``python -m cactus_theory.solvers``.

A row without an answer loses no other: it is named on stderr, marked in what is printed and
saved, and the exit code is 1. 0: every row is solved; 2: bad input, or no row could be solved.
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from cactus_theory.base.arguments import refuse_empty
from cactus_theory.base.terminal import INTERRUPTED, ends_quietly, one_line

from ._commands import COMMANDS, Job
from ._output import Failed, check_path, failures, save, show

REPORTED = (ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError)
COMMAND = f"python -m {__package__}"


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog=COMMAND, description=__doc__)
    commands = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.about, description=command.about))
    return parser


def _solved(jobs: Iterable[Job], results: list[Any], program: str) -> bool:
    """Add every row's answer, or why there is none, to ``results``; return False if interrupted."""
    showing = sys.stderr.isatty()
    try:
        for number, job in enumerate(jobs):
            if showing:
                print(f"\r{program}: row {number}", end="", file=sys.stderr, flush=True)
            try:
                results.append(job())
            except REPORTED as error:
                results.append(Failed(one_line(error)))
    except KeyboardInterrupt:
        return False
    finally:
        if showing:
            print("\r\033[K", end="", file=sys.stderr)
    return True


def _report(args: argparse.Namespace) -> int:
    out = getattr(args, "save_to", None)
    check_path(out)
    results: list[Any] = []
    whole = _solved(COMMANDS[args.program].solve(args), results, args.program)
    failed = failures(results)
    if failed and len(failed) == len(results):
        more = f" (no answer on any of {len(results)} rows)" if len(results) > 1 else ""
        raise RuntimeError(f"{failed[0].error}{more}")
    if out is not None and results:
        save(out, args.program, results)
    show(args.program, results, args.json)
    for row, one in failed.items():
        print(f"{COMMAND} {args.program}: row {row}: {one.error}", file=sys.stderr)
    return INTERRUPTED if not whole else bool(failed)


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        refuse_empty(sys.argv[1:] if arguments is None else arguments)
        return _report(args)
    except REPORTED as error:
        print(f"{COMMAND} {args.program}: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
