"""Kinds of tasks: a module each, which makes the tasks of a grid and the rows of a task.

``FLAGS`` are the flags that only this kind reads, ``tasks(args, cells)`` yields the tasks of
cells (policy, verifier), and ``measure(task)`` returns the rows of one, the same whenever and
wherever it is called. They begin with the task's own columns.
"""

import importlib
from typing import Any

KINDS = ("replay", "markov", "decode")


def kind(name: str) -> Any:
    """Return the module of a kind; each has imports of its own."""
    return importlib.import_module(f"{__name__}.{name}")
