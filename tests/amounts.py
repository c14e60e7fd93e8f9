"""How much of each family of checks runs: a part of it by ``make test``, all of it by
``make test-thorough``, which is ``pytest --thorough``.

Every kind of check runs in both. The thorough suite has more examples (hypothesis: 200 a test, the
plain one 12), knob values, seeds, texts and families of models, all of what :func:`some` cuts, and
tests marked ``thorough``.
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
