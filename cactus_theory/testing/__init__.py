"""Check a user's policy or verifier against its properties; needs the extra ``testing``.

In a test, call ``assert_policy_properties(rule)``; in a shell, run ``cactus-theory check
file.py:rule``. ``@policy_property()`` adds a property: a function of a ``Behaviour`` that yields
``Bounds``. ``assert_verifier_properties`` and ``@verifier_property()`` are the same for verifiers.
"""

from cactus_theory.testing._check_policies import assert_policy_properties
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
