"""The older name of :mod:`cactus_theory.testing.properties`."""

import sys

from cactus_theory.testing import properties

sys.modules[__name__] = properties
