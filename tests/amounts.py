"""How much of each family of checks runs: a part of it by ``make test``, all of it by
``make test-thorough``, which is ``pytest --thorough``.

Every kind of check runs in both. What the thorough suite adds:

* hypothesis: 200 examples a test, where the plain suite has 12 (programs: 40 to 120, where it
  has 7, or 24 for KL)
* annotated shapes on one call of each function in 4, where the plain suite has one in 32
* every registered rule at every knob value (two of each in the plain one); the properties of
  policies at two of each and all other variants, on 1,000 rows a rule at one of them and 100 at
  the others, those of verifiers at two of each
* every causal-LM family of the installed library, more seeds and more texts
* all of each family of cases that is cut by :func:`some` below, and tests marked ``thorough``
"""

from collections.abc import Iterable
from typing import TypeVar

import pytest

# set by tests/conftest.py before any test is imported
THOROUGH = False
# for a test whose seconds buy little beside its neighbours in the plain suite
thorough = pytest.mark.thorough
Kind = TypeVar("Kind")


def amount(plain: int, thorough: int) -> int:
    """Return how many examples to try."""
    return thorough if THOROUGH else plain


def some(values: Iterable[Kind], plain: int) -> list[Kind]:
    """Return all values in the thorough suite, ``plain`` of them evenly spread in the other.

    The first and the last are always among them.
    """
    every = list(values)
    if THOROUGH or plain >= len(every):
        return every
    last = len(every) - 1
    return [every[round(i * last / max(plain - 1, 1))] for i in range(plain)]
