"""Strategies, laws and a checker for testing rules of your own; needs the extra ``testing``.

``assert_policy_laws(rule)`` inside a test, ``cactus-theory check file.py:rule`` in a shell.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.testing import families, laws, strategies
    from cactus_theory.testing._assert import assert_policy_laws, law_cases
    from cactus_theory.testing._load import load_rule
    from cactus_theory.testing._runner import Finding, Report, Verdict

_HOMES = {
    "assert_policy_laws": "_assert",
    "law_cases": "_assert",
    "load_rule": "_load",
    "Finding": "_runner",
    "Report": "_runner",
    "Verdict": "_runner",
}

__all__ = [
    "Finding",
    "Report",
    "Verdict",
    "assert_policy_laws",
    "families",
    "law_cases",
    "laws",
    "load_rule",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that hypothesis is asked for only where it is needed."""
    import importlib

    if name in ("families", "laws", "strategies"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
