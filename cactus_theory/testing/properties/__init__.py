"""The properties of policies, one function each; its docstring is its statement.

``PROPERTIES`` maps names to properties in the order in which they are checked. A property of your
own is a function under ``@policy_property()``: see :func:`cactus_theory.testing.policy_property`.
The older names with ``law``, and :mod:`cactus_theory.testing.laws`, mean the same.

Examples
--------
>>> properties.PROPERTIES["budget_holds"].applies(ct.policy("band:price=1"))
False
>>> properties.PROPERTIES["budget_holds"].applies(ct.policy("band:delta=0.1"))
True
"""

from typing import Any  # noqa: I001  the order of properties

from cactus_theory.testing._property import Bounds, Property
from cactus_theory.testing.properties import always, declared  # noqa: F401
from cactus_theory.testing.properties._behaviour import PROPERTIES, Behaviour, policy_property
from cactus_theory.testing.properties._behaviour import at_knob, knob_ladder, other_knobs

LAWS, Law, law = PROPERTIES, Property, policy_property

__all__ = [
    "LAWS",
    "PROPERTIES",
    "Behaviour",
    "Bounds",
    "Law",
    "Property",
    "at_knob",
    "knob_ladder",
    "law",
    "other_knobs",
    "policy_property",
]


def __getattr__(name: str) -> Any:
    """Return the function of a property."""
    return PROPERTIES.function(__name__, name)
