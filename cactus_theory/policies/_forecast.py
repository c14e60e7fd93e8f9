"""Say how long the O(V²) enumeration of an emitted law takes, before it has taken it."""

from __future__ import annotations

import time
import warnings

from cactus_theory._progress import Progress

# an enumeration that would take longer than SLOW says so as soon as FIRST tell how long it takes,
# and shows how far it is
FIRST_SECONDS, SLOW_SECONDS = 1.0, 5.0
FASTER = (
    "where it does not depend on the refused token, recovery=f(q, p) of ct.rule, or "
    "shared_recovery = True of a class, is asked once a row"
)


class Forecast:
    """Follow an enumeration of ``refused`` tokens of rows of ``vocab``; a context manager.

    Warns
    -----
    UserWarning
        How long it will take, where that is more than ``SLOW_SECONDS``.
    """

    def __init__(self, spec: str, refused: int, vocab: int) -> None:
        self.spec, self.refused, self.vocab = spec, refused, vocab
        self.done, self.start, self.said = 0, time.monotonic(), False
        self._progress: Progress | None = None

    def __enter__(self) -> Forecast:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.__exit__()

    def add(self, tokens: int) -> None:
        """Record that so many more tokens are enumerated."""
        self.done += tokens
        taken = time.monotonic() - self.start
        ahead = taken * self.refused / max(1, self.done)
        tells = not self.said and taken >= FIRST_SECONDS
        self.said |= tells
        if tells and ahead > SLOW_SECONDS:
            warnings.warn(
                f"{self.spec}: the recovery is asked for each of {self.refused:,} tokens that may "
                f"be refused (V = {self.vocab:,}), about {_time(ahead)}; {FASTER}",
                stacklevel=4,
            )
            self._progress = Progress("recovery", self.refused).__enter__()
        if self._progress is not None:
            self._progress.update(self.done, f"{_time(ahead - taken)} left")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
