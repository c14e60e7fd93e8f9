"""Rows and budgets on which programs are compared with closed forms, and a tally of solves.

Not a test module. Nonzero entries are at least 1e-4: below that a solver's tolerance, not a
formula, decides the sixth digit.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from cactus_theory.divergences import read_divergence
from cactus_theory.divergences.definition import examples
from solvers._attempts import SolverGaveUp
from solvers.path_tree import PathTree, count_prefixes
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
    count = amount(most if spec == "kl" else 5, thorough)
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
    return _weighed(weights)


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


def _weighed(weights: np.ndarray) -> np.ndarray:
    """Return ``weights`` as a row whose nonzero entries are not tiny."""
    row = weights / weights.sum()
    row = np.where(row > 0, np.maximum(row, 1.1 * SMALLEST_ENTRY), 0.0)
    return row / row.sum()


def _one_hot(row: np.ndarray, token: int, share: float) -> np.ndarray:
    """Return ``row`` with ``share`` of its mass moved to one token."""
    hot = (1 - share) * row
    hot[token] += share
    return hot


def _smooth(size: int, noise: np.random.Generator) -> np.ndarray:
    return _weighed(noise.dirichlet(np.ones(size)))


def _holed(size: int, noise: np.random.Generator) -> np.ndarray:
    """Return a row with zeros in about a third of its tokens, one at least, not in all."""
    keep = noise.random(size) < 0.67
    keep[noise.permutation(size)[:2]] = (True, False)
    return _weighed(np.where(keep, noise.dirichlet(np.ones(size)) + 1e-3, 0.0))


def families(size: int, noise: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return pairs of rows that random ones are not."""
    q, p = _smooth(size, noise), _smooth(size, noise)
    return {
        "zeros in both": (_holed(size, noise), _holed(size, noise)),
        "nearly equal": (q, _weighed(q * np.exp(0.1 * noise.normal(size=size)))),
        "nearly one-hot": (_weighed(_one_hot(q, 0, 0.95)), _weighed(_one_hot(p, size - 1, 0.9))),
        "one-hot draft": (q, np.eye(size)[int(noise.integers(size))]),
    }


def share_of_draft(spec: str, q: np.ndarray, p: np.ndarray, share: float) -> float:
    """Return a share of the divergence that nearly all of the draft would spend."""
    inside = np.where(q > 0, p, 0.0)
    total = inside.sum()
    whole = 0.05 * q + 0.95 * (inside / total if total > 0 else q)
    value = read_divergence(spec).value(torch.from_numpy(whole), torch.from_numpy(q))
    return max(share * float(value), 1e-3)


def random_tree(vocabulary: int, depth: int, *, seed: int, zeros: float = 0.0) -> PathTree:
    """Return a tree of independent rows; ``zeros`` is the share of excluded tokens, never all."""
    noise = np.random.default_rng(seed)
    shape = count_prefixes(vocabulary, depth), vocabulary
    logits = noise.standard_normal(shape)
    rows = []
    for each in (logits, logits + noise.standard_normal(shape)):
        out = noise.random(shape) < zeros
        out[np.arange(len(out)), noise.integers(vocabulary, size=len(out))] = False
        weights = np.where(out, 0.0, np.exp(each))
        rows.append(weights / weights.sum(-1, keepdims=True))
    return PathTree(*rows)


class Tally:
    """How many solves gave up."""

    def __init__(self) -> None:
        self.solved = self.gave_up = 0

    def solve(self, program: Callable[..., Any], *args: Any, **knobs: Any) -> Any:
        """Return the program's result, None if its solver gave up."""
        try:
            result = program(*args, **knobs)
        except SolverGaveUp:
            self.gave_up += 1
            return None
        self.solved += 1
        return result

    def check(self) -> None:
        """Fail if too many solves gave up."""
        assert self.solved > 0
        assert self.gave_up <= ALLOWED_TO_GIVE_UP * (self.solved + self.gave_up)
