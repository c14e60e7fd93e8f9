"""All properties of policies. Each is a function whose docstring states what must be true.

``PROPERTIES`` maps names to properties in the order in which they are checked. To add a property,
put ``@policy_property()`` on a function: see :func:`cactus_theory.testing.policy_property`.
"""

from cactus_theory.testing.definition import Bounds as Bounds  # noqa: I001  their order
from cactus_theory.testing.properties import always, declared  # noqa: F401
from cactus_theory.testing.properties.behaviour import PROPERTIES as PROPERTIES
from cactus_theory.testing.properties.behaviour import Behaviour as Behaviour
from cactus_theory.testing.properties.behaviour import policy_property as policy_property
