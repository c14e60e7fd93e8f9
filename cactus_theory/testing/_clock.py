"""How long a call of a policy may take, estimated from its first calls."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cactus_theory.testing.laws import Behaviour

# the first property makes each call about once, others up to this often (at values of a knob)
ONCE, ASKED = 2, 40
# factor for a machine that becomes busier than it was during the first calls
BUSIER = 5.0
# seconds after which a row that hung once counts as hanging again
HANG_AGAIN = 1.0
# seconds between two messages to the process that waits for this one
QUIET = 0.2


class Hang(Exception):
    """A rule did not answer in time."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise Hang after so many seconds, where the system can interrupt Python."""
    possible = (
        seconds is not None
        and hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
    )
    if not possible:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"no answer within {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Clock:
    """The time limit for one property on some rows; None everywhere if ``least`` is None.

    Attributes
    ----------
    least : seconds that are always allowed; more rows get more.
    each : seconds that one drafted token took, the slowest answer so far.
    tell : called with the number of seconds that the next answer may take.
    """

    def __init__(
        self, least: float | None, tell: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self.least, self.tell = least, tell
        self.each = 0.0
        self._told = (-float("inf"), 0.0)

    def limit(self, seen: Behaviour, asked: int = ASKED) -> float | None:
        """Return the seconds for a property that makes each call ``asked`` times."""
        if self.least is None:
            return None
        seconds = self.least + asked * BUSIER * self.each * _questions(seen)
        now = time.monotonic()
        if now - self._told[0] > QUIET or seconds > self._told[1]:
            self._told = now, seconds
            self.tell(seconds)
        return seconds

    def limit_again(self, seen: Behaviour, asked: int = ASKED) -> float | None:
        """Return the seconds for a single row that may be the one without an answer."""
        whole = self.limit(seen, asked)
        if whole is None or self.least is None:
            return None
        return whole - self.least + min(self.least / 5, HANG_AGAIN)

    def took(self, seen: Behaviour, seconds: float) -> None:
        """Record how long it took to make each call once."""
        self.each = max(self.each, seconds / _questions(seen))


def _questions(seen: Behaviour) -> int:
    return max(1, int(seen.drafted.sum()))
