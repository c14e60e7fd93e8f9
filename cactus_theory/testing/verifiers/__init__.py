"""The properties of verifiers, one function each; its docstring is its statement.

``VERIFIER_PROPERTIES`` maps names to properties in the order in which they are checked. One of
your own is a function under ``@verifier_property()``.

Examples
--------
>>> verifiers.VERIFIER_PROPERTIES["counts_have_a_law"].statement
'On every path the probabilities of 0 … K accepted tokens are ≥ 0 and sum to 1.'
"""

from typing import Any  # noqa: I001  the order of properties

from cactus_theory.testing._property import Property as VerifierProperty
from cactus_theory.testing.verifiers import exact, coins, batches  # noqa: F401
from cactus_theory.testing.verifiers._assert import POLICIES, assert_verifier_properties
from cactus_theory.testing.verifiers._enumeration import (
    VERIFIER_PROPERTIES,
    Enumeration,
    verifier_property,
)
from cactus_theory.testing.verifiers._trees import Trees, trees

__all__ = [
    "POLICIES",
    "VERIFIER_PROPERTIES",
    "Enumeration",
    "Trees",
    "VerifierProperty",
    "assert_verifier_properties",
    "trees",
    "verifier_property",
]


def __getattr__(name: str) -> Any:
    """Return the function of a property."""
    return VERIFIER_PROPERTIES.function(__name__, name)
