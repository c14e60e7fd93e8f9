"""An older name of :mod:`cactus_theory.verify.contract`, where verifiers are registered."""

import sys

from cactus_theory.verify import contract

sys.modules[__name__] = contract
