"""Packages that a test takes away."""

import sys

import pytest


def without_rich(patch: pytest.MonkeyPatch) -> None:
    """Make every import of rich fail, as where only the library's own needs are installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, "rich", None)
