"""The properties of policies, one function each; its docstring is its statement.

``LAWS`` maps names to properties in the order in which they are checked. A property of your
own is a function under ``@law()``: see :func:`cactus_theory.testing.policy_property`.
(:mod:`cactus_theory.testing.laws` is an older name of this module.)

Examples
--------
>>> properties.LAWS["budget_holds"].applies(ct.policy("band:price=1"))
False
>>> properties.LAWS["budget_holds"].applies(ct.policy("band:delta=0.1"))
True
"""

from typing import Any  # noqa: I001  the order of properties

from cactus_theory.testing._property import Bounds
from cactus_theory.testing._property import Property as Law
from cactus_theory.testing.properties import always, declared  # noqa: F401
from cactus_theory.testing.properties._behaviour import LAWS, Behaviour, law
from cactus_theory.testing.properties._behaviour import at_knob, knob_ladder, other_knobs

__all__ = ["LAWS", "Behaviour", "Bounds", "Law", "at_knob", "knob_ladder", "law", "other_knobs"]


def __getattr__(name: str) -> Any:
    """Return the function of a property."""
    return LAWS.function(__name__, name)
