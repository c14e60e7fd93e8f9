"""One progress display: a bar on a terminal that rich can draw on, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

# seconds between two lines where no bar can be drawn
LINE_EVERY_S = 15.0


class Progress:
    """Show how far a piece of work is, on stderr; use as a context manager.

    Parameters
    ----------
    label : what is being done.
    total : how many steps there are.
    done : how many were finished before.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self.shown, self.said = time.monotonic(), False
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and (bar := _bar()) is not None:
            self._bar = bar
            bar.start()
            bar.add_task(self.label, total=self.total, completed=self.done, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Record that one more step is finished."""
        self.update(self.done + 1, note)

    def update(self, done: int, note: str = "") -> None:
        """Record that ``done`` steps are finished; ``note`` is shown beside them."""
        self.done = done
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
        elif now - self.shown >= LINE_EVERY_S or (self.said and done == self.total):
            self.shown, self.said = now, True
            print(f"{self.label} {done}/{self.total} {note}".rstrip(), file=sys.stderr, flush=True)

    def of(self, done: int, total: int) -> None:
        """Record that ``done`` of ``total`` steps are finished."""
        self.total = total
        self.update(done)

    def texts(self, done: int, texts: int) -> None:
        """Record how much was logged in how many texts; the last text may add more than needed."""
        self.update(min(done, self.total), f"{texts} texts")


def _bar() -> Any:
    """Return a bar that goes away when it is finished, None without rich."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
