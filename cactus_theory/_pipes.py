"""How a command ends: in one line for an error or Ctrl-C, quietly when its output has no reader."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

# what a shell reports of a command that SIGPIPE ended: 128 + 13
BROKEN_PIPE = 141
# and of one that Ctrl-C ended: 128 + 2
INTERRUPTED = 130
NOTHING_KEPT = "nothing is kept: the same command starts again"
LONGEST = 1200  # characters of an error
Given = ParamSpec("Given")


def one_line(error: Exception) -> str:
    """Return what an error says as one line, without the middle of what would fill the screen."""
    said = " ".join(str(error).split()) or type(error).__name__
    half = LONGEST // 2
    return said if len(said) <= LONGEST else f"{said[:half]} … {said[-half:]}"


def ends_quietly(main: Callable[Given, int]) -> Callable[Given, int]:
    """Make a command stop silently, with status 141, once its stdout is closed.

    SIGPIPE itself stays ignored, as Python sets it: writing to a worker process that has died
    must raise, not end the command.
    """

    @functools.wraps(main)
    def run(*arguments: Given.args, **options: Given.kwargs) -> int:
        real = sys.stdout
        sys.stdout = _Output(real)  # type: ignore[assignment]
        try:
            return main(*arguments, **options)
        finally:
            try:
                sys.stdout.flush()  # here, because an error at exit cannot be handled
            finally:
                sys.stdout = real

    return run


def interrupted(command: str, kept: str | None = None) -> int:
    """Say on a line of its own that Ctrl-C ended a command and what is kept; return 130."""
    start = "\r\033[K" if sys.stderr.isatty() else ""  # over ^C and a line of progress
    print(f"{start}{command}: interrupted; {kept or NOTHING_KEPT}", file=sys.stderr)
    return INTERRUPTED


class _Output:
    """A text stream that leaves with status 141 where the real one would raise.

    ``SystemExit``, because commands report an ``OSError`` as bad input.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def write(self, text: str) -> int:
        try:
            return self._real.write(text)
        except BrokenPipeError:
            self._leave()

    def flush(self) -> None:
        try:
            self._real.flush()
        except BrokenPipeError:
            self._leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _leave(self) -> NoReturn:
        # discard what is buffered, or the interpreter reports an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._real.fileno())
        raise SystemExit(BROKEN_PIPE)
