"""How commands show progress and end on a terminal.

They print a line of progress now and then, one line for an error or Ctrl-C, and nothing more once
their output is closed.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec

# exit status of a command whose output nobody reads, as a shell reports SIGPIPE: 128 + 13
BROKEN_PIPE = 141
# exit status of a command that Ctrl-C ended: 128 + 2
INTERRUPTED = 130
NOTHING_KEPT = "nothing is kept: the same command starts again"
# errors of bad input, shown as one line, as are errors of a FILE.py; others keep their traceback
REPORTED = (ValueError, TypeError, OSError, ModuleNotFoundError, RuntimeError)
LONGEST = 1200  # most characters of an error's line
Given = ParamSpec("Given")


def one_line(error: BaseException | str) -> str:
    """Return an error's message as one line; a very long one loses its middle."""
    line = " ".join(str(error).split()) or type(error).__name__
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} … {line[-half:]}"


def ends_quietly(main: Callable[Given, int]) -> Callable[Given, int]:
    """Make a command stop silently, with status 141, once its stdout is closed.

    If stdout cannot be written for another reason, such as a full disk, the command stops with one
    line and status 2. Text that stderr does not take is lost. SIGPIPE itself stays ignored, as
    Python sets it: writing to a worker process that has died must raise, not end the command.
    """

    @functools.wraps(main)
    def run(*arguments: Given.args, **options: Given.kwargs) -> int:
        real, errors = sys.stdout, sys.stderr
        if isinstance(real, io.TextIOWrapper) and real.errors == "strict":
            real.reconfigure(errors="replace")  # for characters that an encoding lacks
        sys.stdout = _Output(real)  # type: ignore[assignment]
        if sys.stderr is None:  # else print would use stdout, and the next file number 2
            sys.stderr = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
        sys.stderr = _Output(sys.stderr, may_be_lost=True)  # type: ignore[assignment]
        try:
            return main(*arguments, **options)
        finally:
            try:
                sys.stdout.flush()  # here, because an error at exit cannot be handled
            finally:
                sys.stdout, sys.stderr = real, errors

    return run


def interrupted(command: str, kept: str | None = None) -> int:
    """Print that Ctrl-C ended a command and which results are kept; return 130."""
    start = "\r\033[K" if sys.stderr.isatty() else ""  # over ^C and a line of progress
    print(f"{start}{command}: interrupted; {kept or NOTHING_KEPT}", file=sys.stderr)
    return INTERRUPTED


@contextmanager
def importing(command: str) -> Generator[None]:
    """End the process as :func:`interrupted` if Ctrl-C comes while a command's modules load."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(interrupted(command)) from None


class _Output:
    """A text stream that ends the process if writing fails; with ``may_be_lost`` it drops the text.

    The status is 141 for a closed stream, else 2. The error is ``SystemExit``, because commands
    report an ``OSError`` as bad input.
    """

    def __init__(self, real: Any, may_be_lost: bool = False) -> None:
        self._real, self._may_be_lost = real, may_be_lost

    def write(self, text: str) -> int:
        if self._real is None:  # it was closed before the start
            raise SystemExit(BROKEN_PIPE)
        try:
            return self._real.write(text)
        except OSError as error:
            self._leave(error)
        return len(text)

    def flush(self) -> None:
        try:
            if self._real is not None:
                self._real.flush()
        except OSError as error:
            self._leave(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _leave(self, error: OSError) -> None:
        # discard what is buffered, or the interpreter reports an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._real.fileno())
        if self._may_be_lost:
            return
        if isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE)
        print(f"stdout: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(2)


# seconds until the first line of progress, and between two lines
FIRST_LINE_S, LINE_EVERY_S = 5.0, 15.0


class Progress:
    """Show the progress of a piece of work on stderr.

    ``label`` names the work; ``done`` of ``total`` steps are finished at the start.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self.shown, self.said = time.monotonic(), False

    def advance(self, note: str = "") -> None:
        """Record that one more step is finished."""
        self.update(self.done + 1, note)

    def update(self, done: int, note: str = "") -> None:
        """Record that ``done`` steps are finished; ``note`` is shown beside them."""
        self.done = done
        now = time.monotonic()
        due = self.shown + (LINE_EVERY_S if self.said else FIRST_LINE_S)
        if now >= due or (self.said and done == self.total):
            self.shown, self.said = now, True
            print(f"{self.label} {done}/{self.total} {note}".rstrip(), file=sys.stderr, flush=True)

    def of(self, done: int, total: int) -> None:
        """Record that ``done`` of ``total`` steps are finished."""
        self.total = total
        self.update(done)

    def step(self, label: str, done: int, total: int) -> None:
        """Record that ``done`` of ``total`` steps of ``label`` are finished."""
        self.label = label
        self.of(done, total)

    def texts(self, done: int, texts: int) -> None:
        """Record ``done`` finished steps, shown as at most ``total``, and ``texts`` texts."""
        self.update(min(done, self.total), f"{texts} texts")
