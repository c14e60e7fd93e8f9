"""The properties of policies, one function each; its docstring is its statement.

``PROPERTIES`` maps names to properties in the order in which they are checked. A property of your
own is a function under ``@policy_property()``: see :func:`cactus_theory.testing.policy_property`.

Examples
--------
>>> properties.PROPERTIES["budget_holds"].applies(ct.policy("band:price=1"))
False
>>> properties.PROPERTIES["budget_holds"].applies(ct.policy("band:delta=0.1"))
True
"""

from cactus_theory.testing._property import Bounds, Property  # noqa: I001  their order
from cactus_theory.testing.properties import always, declared  # noqa: F401
from cactus_theory.testing.properties._behaviour import PROPERTIES, Behaviour, policy_property


__all__ = [
    "PROPERTIES",
    "Behaviour",
    "Bounds",
    "Property",
    "policy_property",
]
