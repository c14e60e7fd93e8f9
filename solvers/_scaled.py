"""The row of a program in variables that are all of order one.

The row is h = s∘w on the tokens with q > 0, plus a total mass z on the tokens with q = 0
(identically 0 unless the program allows it and f′(∞) < ∞). Solvers see w, whose entries are
near one when s is near h; in plain h a vocabulary of a thousand tokens fails.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check


def cvxpy() -> Any:
    """Return the cvxpy module, or raise an error that names its extra."""
    return check.optional_module("cvxpy", "solvers")


@dataclass(frozen=True)
class Scaled:
    """The row of a program: h = s∘w where q > 0, z in total where q = 0; all float64 (m,)."""

    q: np.ndarray
    s: np.ndarray
    w: Any
    z: Any = 0.0

    @property
    def h(self) -> Any:
        """Return h where q > 0, as a cvxpy expression."""
        return times(self.s, self.w)

    @property
    def total(self) -> Any:
        """Return Σh over the whole vocabulary."""
        return self.s @ self.w + self.z


def times(left: np.ndarray, right: Any) -> Any:
    """Return left∘right as a cvxpy expression."""
    return cvxpy().multiply(left, right)
