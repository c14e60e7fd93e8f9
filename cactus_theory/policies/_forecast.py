"""Say how long the O(V²) enumeration of an emitted law takes, before it has taken it."""

from __future__ import annotations

import time
import warnings

from cactus_theory.base.terminal import Progress

# an enumeration that would take longer than SLOW says so as soon as FIRST tell how long it takes,
# and shows how far it is
FIRST_SECONDS, SLOW_SECONDS = 1.0, 5.0
FASTER = (
    "where it does not depend on the refused token, recovery=f(q, p) of ct.rule, or "
    "shared_recovery = True of a class, is asked once a row"
)


class Forecast(Progress):
    """Follow an enumeration of ``refused`` tokens of rows of ``vocab``, shown if it is slow.

    Warns
    -----
    UserWarning
        How long it will take, where that is more than ``SLOW_SECONDS``.
    """

    def __init__(self, spec: str, refused: int, vocab: int) -> None:
        super().__init__("recovery", refused)
        self.spec, self.vocab, self.start = spec, vocab, time.monotonic()
        self.slow: bool | None = None  # not known yet

    def __enter__(self) -> Forecast:
        return self

    def add(self, tokens: int) -> None:
        """Record that so many more tokens are enumerated."""
        self.done += tokens
        taken = time.monotonic() - self.start
        ahead = taken * self.total / max(1, self.done)
        if self.slow is None and taken >= FIRST_SECONDS:
            self.slow = ahead > SLOW_SECONDS
            if self.slow:
                warnings.warn(
                    f"{self.spec}: the recovery is asked for each of {self.total:,} tokens that "
                    f"may be refused (V = {self.vocab:,}), about {_time(ahead)}; {FASTER}",
                    stacklevel=4,
                )
                super().__enter__()
        if self.slow:
            self.update(self.done, f"{_time(ahead - taken)} left")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
