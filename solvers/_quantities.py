"""The quantities that a constraint may use, by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cactus_theory import _arguments as check
from cactus_theory.divergences import Divergence

from . import _rows
from ._left_sides import left_side
from ._scaled import Scaled, cvxpy


@dataclass(frozen=True)
class Quantities:
    """One row being designed, as cvxpy expressions and numpy rows over the vocabulary (V,).

    Attributes
    ----------
    q, p : the target and the draft row, numpy.
    h : the row being designed, affine; 0 where q = 0.
    ratio : h/q, affine; 0 where q = 0.
    accepted : min(p, h), concave: what is drafted and kept, token by token.
    acceptance, rejection : its sum, concave, and one minus it, convex.
    """

    q: np.ndarray
    p: np.ndarray
    row: Scaled

    @property
    def h(self) -> Any:
        """Return the row being designed."""
        return self._spread(self.row.s)

    @property
    def ratio(self) -> Any:
        """Return h/q."""
        return self._spread(self.row.s / self.row.q)

    @property
    def accepted(self) -> Any:
        """Return min(p, h) of each token."""
        return cvxpy().minimum(self.p, self.h)

    @property
    def acceptance(self) -> Any:
        """Return Σ min(p, h)."""
        cp, s = cvxpy(), self.row.s
        return s @ cp.minimum(self.p[self.inside] / s, self.row.w)

    @property
    def rejection(self) -> Any:
        """Return 1 − Σ min(p, h)."""
        return 1 - self.acceptance

    @property
    def inside(self) -> np.ndarray:
        """Return where q > 0."""
        return self.q > 0

    def divergence(self, spec: str | Divergence) -> Any:
        """Return D(h‖q), convex, of an f-divergence: sums of several may be bounded too.

        Raises
        ------
        ValueError
            A Rényi or the max-divergence: ask for a budget on them instead.
        """
        return left_side(self.row, _rows.additive(spec, "here"))

    def _spread(self, scale: np.ndarray) -> Any:
        """Return scale∘w at the tokens with q > 0 among zeros."""
        sparse = check.optional_module("scipy.sparse", "solvers")
        place = (np.flatnonzero(self.inside), np.arange(len(scale)))
        return sparse.csc_matrix((scale, place), (len(self.q), len(scale))) @ self.row.w
