"""Strategies, properties and a checker for policies of your own; needs the extra ``testing``.

``assert_policy_laws(rule)`` inside a test, ``cactus-theory check file.py:rule`` in a shell.
``@policy_property()`` adds a property: a function of a ``Behaviour`` that yields ``Bounds``.
``assert_verifier_properties``, ``assert_drafter_properties`` and ``assert_schedule_properties``
check what else decoding relies on.

What tests check is called a *property*; the older names with ``law`` mean the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.testing import families, laws, strategies, verifiers
    from cactus_theory.testing._assert import assert_policy_laws, law_cases
    from cactus_theory.testing._assert import assert_policy_laws as assert_policy_properties
    from cactus_theory.testing._assert import law_cases as property_cases
    from cactus_theory.testing._drafter import assert_drafter_properties
    from cactus_theory.testing._load import load_rule
    from cactus_theory.testing._report import Finding, Report, Verdict
    from cactus_theory.testing._schedule import assert_schedule_properties
    from cactus_theory.testing.laws import LAWS as PROPERTIES
    from cactus_theory.testing.laws import Behaviour, Bounds
    from cactus_theory.testing.laws import Law as Property
    from cactus_theory.testing.laws import law as policy_property
    from cactus_theory.testing.verifiers import (
        VERIFIER_PROPERTIES,
        VerifierProperty,
        assert_verifier_properties,
        verifier_property,
    )

# name → (module, name there)
_HOMES = {
    "Behaviour": ("laws", "Behaviour"),
    "Bounds": ("laws", "Bounds"),
    "Finding": ("_report", "Finding"),
    "PROPERTIES": ("laws", "LAWS"),
    "Property": ("laws", "Law"),
    "Report": ("_report", "Report"),
    "VERIFIER_PROPERTIES": ("verifiers", "VERIFIER_PROPERTIES"),
    "Verdict": ("_report", "Verdict"),
    "VerifierProperty": ("verifiers", "VerifierProperty"),
    "assert_drafter_properties": ("_drafter", "assert_drafter_properties"),
    "assert_policy_laws": ("_assert", "assert_policy_laws"),
    "assert_policy_properties": ("_assert", "assert_policy_laws"),
    "assert_schedule_properties": ("_schedule", "assert_schedule_properties"),
    "assert_verifier_properties": ("verifiers", "assert_verifier_properties"),
    "law_cases": ("_assert", "law_cases"),
    "load_rule": ("_load", "load_rule"),
    "policy_property": ("laws", "law"),
    "property_cases": ("_assert", "law_cases"),
    "verifier_property": ("verifiers", "verifier_property"),
}

__all__ = [
    "PROPERTIES",
    "VERIFIER_PROPERTIES",
    "Behaviour",
    "Bounds",
    "Finding",
    "Property",
    "Report",
    "Verdict",
    "VerifierProperty",
    "assert_drafter_properties",
    "assert_policy_laws",
    "assert_policy_properties",
    "assert_schedule_properties",
    "assert_verifier_properties",
    "families",
    "law_cases",
    "laws",
    "load_rule",
    "policy_property",
    "property_cases",
    "strategies",
    "verifier_property",
    "verifiers",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that hypothesis is only needed where it is used."""
    import importlib

    if name in ("families", "laws", "strategies", "verifiers"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        home, there = _HOMES[name]
        return getattr(importlib.import_module(f"{__name__}.{home}"), there)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
