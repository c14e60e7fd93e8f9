"""Strategies, properties and a checker for policies of your own; needs the extra ``testing``.

``assert_policy_properties(rule)`` inside a test, ``cactus-theory check file.py:rule`` in a shell.
``@policy_property()`` adds a property: a function of a ``Behaviour`` that yields ``Bounds``.
``assert_verifier_properties`` and ``@verifier_property()`` are the same of verifiers.
"""

from cactus_theory.testing._policies import assert_policy_properties
from cactus_theory.testing.definition import Bounds
from cactus_theory.testing.properties import Behaviour, policy_property
from cactus_theory.testing.verifiers import (
    Enumeration,
    assert_verifier_properties,
    verifier_property,
)

__all__ = [
    "Behaviour",
    "Bounds",
    "Enumeration",
    "assert_policy_properties",
    "assert_verifier_properties",
    "policy_property",
    "verifier_property",
]
