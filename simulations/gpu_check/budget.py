"""The time a run or a section has: work shrinks to fit, and what does not fit is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# seconds kept for writing the report at the end of a run
WRITING_S = 10.0


class Budget:
    """Some seconds, counted from now on.

    Parameters
    ----------
    seconds : how many there are, ≥ 0.
    now : the clock, in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now = seconds, now
        self.end = now() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left, 0 when there are none."""
        return max(0.0, self.end - self.now())

    def share(self, name: str, weights: Mapping[str, float]) -> float:
        """Return the seconds ``name`` may take of what is left.

        ``weights`` are those of ``name`` and of everything that is still to come, so that
        whatever one of them does not use is there for the next.
        """
        return self.left * weights[name] / sum(weights.values())
