"""Sections that measure nothing, for tests of what happens around them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulations.gpu_check import sections

Rows = Callable[[Any], Iterator[Any]]
CHECK = {"check": "made up", "passed": True}
STEP = {"policy": "speculative", "verifier": "chain", "batch": 1, "drafted": 4, "vocabulary": 9}
STEP |= {"kernel_us": None, "torch_us": 5.0, "floor_us": 1.0}


def install(monkeypatch: pytest.MonkeyPatch, **own: Rows) -> None:
    """Replace the sections named; the others give nothing."""
    monkeypatch.setattr(sections, "load", lambda name: own.get(name, lambda bench: iter(())))


def gives(*rows: Any) -> Rows:
    return lambda bench: iter(rows)
