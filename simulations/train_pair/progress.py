"""One progress display: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 15.0


class Progress:
    """Show step, loss and speed; use as a context manager."""

    def __init__(self, label: str, total: int, done: int, console: Console | None = None) -> None:
        self.label, self.total, self.done = label, total, done
        self.console = console or Console(stderr=True)
        self.begun = self.shown = time.monotonic()
        self.first = done
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            note = TextColumn("{task.fields[note]}")
            self.bar = Bar(*columns, TimeRemainingColumn(), note, console=self.console)
            self.bar.start()
            self.bar.add_task(self.label, total=self.total, completed=self.done, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, loss: float | None, tokens_per_step: int) -> None:
        """Record that ``done`` steps are finished."""
        self.done = done
        now = time.monotonic()
        speed = (done - self.first) * tokens_per_step / max(1e-9, now - self.begun)
        value = "" if loss is None else f"loss {loss:.3f} nats, "
        note = f"{value}{speed:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=note)
        elif now - self.shown >= LINE_EVERY_S or done == self.total:
            self.shown = now
            self.console.print(f"{self.label} {done}/{self.total} {note}", highlight=False)
