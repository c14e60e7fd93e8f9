"""Rows and budgets on which programs are compared with closed forms, and a tally of solves.

Not a test module. Nonzero entries are at least 1e-4: below that a solver's tolerance, not a
formula, decides the sixth digit.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from cactus_theory.divergences import read_divergence
from cactus_theory.divergences.definition import examples
from solvers._attempts import SolverGaveUp
from tests.amounts import amount

LARGEST_VOCABULARY = 32
SMALLEST_ENTRY = 1e-4
# The share of rows on which a solver may give up before a comparison counts for little.
ALLOWED_TO_GIVE_UP = 0.02

DIVERGENCES = (*examples(), "alpha:a=-0.7", "alpha:a=1.43", "renyi:a=0.5")
LINEAR = tuple(spec for spec in DIVERGENCES if read_divergence(spec).linear)


def examples(spec: str, most: int = 24, thorough: int = 120) -> hypothesis.settings:
    """Return how many examples a divergence gets: most for the main one; a solve takes 25 ms.

    ``thorough`` of each in the thorough suite.
    """
    count = amount(most if spec == "kl" else 7, thorough)
    return hypothesis.settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


def _row(logs: list[float | None]) -> np.ndarray:
    weights = np.array([0.0 if log is None else np.exp(log) for log in logs])
    if not weights.any():
        weights[0] = 1.0
    weights /= weights.sum()
    weights = np.where(weights > 0, np.maximum(weights, 1.1 * SMALLEST_ENTRY), 0.0)
    return weights / weights.sum()


def _logs(size: int) -> st.SearchStrategy[list[float | None]]:
    entry = st.one_of(st.none(), *[st.floats(-9, 0)] * 4)
    return st.lists(entry, min_size=size, max_size=size)


def pairs() -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Return target and draft rows of one vocabulary; either may have zeros."""
    sizes = st.integers(2, LARGEST_VOCABULARY)
    return sizes.flatmap(lambda size: st.tuples(_logs(size).map(_row), _logs(size).map(_row)))


def budgets() -> st.SearchStrategy[float]:
    """Return budgets spread evenly in log δ over [1e-2, 3]."""
    return st.floats(np.log(1e-2), np.log(3)).map(lambda log: float(np.exp(log)))


class Tally:
    """How many solves gave up, and the largest error of each kind."""

    def __init__(self) -> None:
        self.solved = self.gave_up = 0
        self.errors: dict[str, float] = {}

    def solve(self, program: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
        """Return the program's result, None if its solver gave up."""
        try:
            result = program(*args, **knobs)
        except SolverGaveUp:
            self.gave_up += 1
            return None
        self.solved += 1
        return result

    def record(self, name: str, error: float) -> float:
        """Keep the largest error seen and return this one."""
        self.errors[name] = max(self.errors.get(name, 0.0), float(error))
        return float(error)

    def check(self, label: str) -> None:
        """Print what was measured; fail if too many solves gave up."""
        shown = ", ".join(f"{name} {error:.1e}" for name, error in sorted(self.errors.items()))
        print(f"{label}: {self.solved} solved, {self.gave_up} gave up; largest error: {shown}")
        assert self.solved > 0
        assert self.gave_up <= ALLOWED_TO_GIVE_UP * (self.solved + self.gave_up)
