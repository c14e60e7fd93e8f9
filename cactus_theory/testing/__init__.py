"""Strategies, properties and a checker for policies of your own; needs the extra ``testing``.

``assert_policy_laws(rule)`` inside a test, ``cactus-theory check file.py:rule`` in a shell.
``@policy_property()`` adds a property: a function of a ``Behaviour`` that yields ``Bounds``.

What tests check is called a *property*; the older names with ``law`` mean the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.testing import families, laws, strategies
    from cactus_theory.testing._assert import assert_policy_laws, law_cases
    from cactus_theory.testing._assert import assert_policy_laws as assert_policy_properties
    from cactus_theory.testing._assert import law_cases as property_cases
    from cactus_theory.testing._load import load_rule
    from cactus_theory.testing._report import Finding, Report, Verdict
    from cactus_theory.testing._schedule import assert_schedule_properties
    from cactus_theory.testing.laws import LAWS as PROPERTIES
    from cactus_theory.testing.laws import Behaviour, Bounds
    from cactus_theory.testing.laws import Law as Property
    from cactus_theory.testing.laws import law as policy_property

# name → (module, name there)
_HOMES = {
    "Behaviour": ("laws", "Behaviour"),
    "Bounds": ("laws", "Bounds"),
    "Finding": ("_report", "Finding"),
    "PROPERTIES": ("laws", "LAWS"),
    "Property": ("laws", "Law"),
    "Report": ("_report", "Report"),
    "Verdict": ("_report", "Verdict"),
    "assert_policy_laws": ("_assert", "assert_policy_laws"),
    "assert_policy_properties": ("_assert", "assert_policy_laws"),
    "assert_schedule_properties": ("_schedule", "assert_schedule_properties"),
    "law_cases": ("_assert", "law_cases"),
    "load_rule": ("_load", "load_rule"),
    "policy_property": ("laws", "law"),
    "property_cases": ("_assert", "law_cases"),
}

__all__ = [
    "PROPERTIES",
    "Behaviour",
    "Bounds",
    "Finding",
    "Property",
    "Report",
    "Verdict",
    "assert_policy_laws",
    "assert_policy_properties",
    "assert_schedule_properties",
    "families",
    "law_cases",
    "laws",
    "load_rule",
    "policy_property",
    "property_cases",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that hypothesis is only needed where it is used."""
    import importlib

    if name in ("families", "laws", "strategies"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        home, there = _HOMES[name]
        return getattr(importlib.import_module(f"{__name__}.{home}"), there)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
