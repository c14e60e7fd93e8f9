r"""Write the budget D(h‖q) ≤ δ as cvxpy constraints, in variables that are all of order one.

The usual constraint is Σ q f(h/q) + f′(∞) z ≤ δ_f. Here f is the generator of D (D rises with this
sum, and is the sum itself if D is an f-divergence), δ_f is the value of the sum at D = δ, and z is
the mass of h on tokens with q = 0. A divergence class may register another constraint by
:func:`budget_of`, or another form of the left side by :func:`left_side_of`.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from cactus_theory.divergences import Divergence, FDivergence
from cactus_theory.divergences.classical import MaxDivergence, Renyi, TotalVariation

from ._perspective import Scaled, Terms, cvxpy, entered_in, perspective, power

# e^x overflows float64 from 709.8; a budget above this never binds.
LARGEST_EXPONENT = 700.0

_LEFT_SIDES: dict[type, Callable[[Scaled, Any], Any]] = {}
# decorator: registers a function of (row, divergence) as the left side for a divergence class
left_side_of = partial(entered_in, _LEFT_SIDES)


def left_side(row: Scaled, kind: FDivergence) -> Any:
    """Return Σ q f(h/q) over the tokens with q > 0, a convex cvxpy expression.

    Raises ValueError for a divergence without a form for cvxpy.
    """
    if type(kind) in _LEFT_SIDES:
        return _LEFT_SIDES[type(kind)](row, kind)
    return row.q @ perspective(Terms(row.w, 1, row.s / row.q), kind)


@left_side_of(TotalVariation)
def _total_variation_of_row(row: Scaled, f: FDivergence) -> Any:
    # the same sum as the usual form, but in units of h: of many optimal rows, the units decide at
    # which one a simplex method stops
    return cvxpy().sum(cvxpy().abs(row.h - row.q)) / 2


@dataclass(frozen=True)
class Budget:
    """The constraints of D(h‖q) ≤ δ, with the factors that convert their dual values.

    The Lagrange dual needs the multiplier λ of the bound on ``Σ q f(h/q)`` and the multiplier μ of
    ``Σh = 1``. If the constraint is written in another form, λ is ``multiplier`` times the
    constraint's dual value, and μ gains ``tilt`` times λ, as the forms differ by a multiple of Σh.
    The price dA/dδ, A being the acceptance, is ``weight`` times the dual value. If ``weight`` is an
    array by token, the products are summed.
    """

    constraints: list[Any]
    _: KW_ONLY
    weight: np.ndarray | float = 1.0
    multiplier: float = 1.0
    tilt: float = 0.0

    @property
    def price(self) -> float:
        """Return the derivative of the optimum in δ, from the constraint's dual values."""
        if not self.constraints:
            return 0.0
        dual = self.constraints[0].dual_value
        return max(0.0, float(np.sum(np.asarray(dual) * self.weight)))

    @property
    def slope(self) -> float:
        """Return λ, the multiplier of Σ q f(h/q) ≤ δ_f."""
        # weights by token belong to a limit on h/q of each token, which has no generator
        if not self.constraints or isinstance(self.weight, np.ndarray):
            return 0.0
        return max(0.0, float(np.sum(self.constraints[0].dual_value))) * self.multiplier


_FORMS: dict[type, Callable[[Scaled, Any, float], Budget]] = {}
# decorator: registers a function of (row, divergence, delta) as the budget of a divergence class
budget_of = partial(entered_in, _FORMS)


def budget(row: Scaled, kind: Divergence, delta: float) -> Budget:
    """Return D(h‖q) ≤ ``delta`` as cvxpy constraints; an infinite budget has no constraint."""
    if math.isinf(delta):
        return Budget([])
    return _FORMS.get(type(kind), _generated)(row, kind, delta)


def generator_budget(kind: Divergence, delta: float) -> float:
    """Return δ_f, for which Σ q f(h/q) ≤ δ_f is equivalent to D(h‖q) ≤ ``delta``."""
    return float(kind.to_generator(torch.tensor(delta, dtype=torch.float64)))


def most_of(kind: Divergence, delta: float) -> float:
    """Return the largest h/q that D ≤ ``delta`` allows, at most e^700, if D limits each h/q."""
    ceiling = float(kind.ceiling(torch.tensor(delta, dtype=torch.float64)))
    return min(ceiling, math.exp(LARGEST_EXPONENT))


def _generated(row: Scaled, kind: Divergence, delta: float) -> Budget:
    """Return the budget as Σ q f(h/q) + f′(∞) z ≤ δ_f, with f the generator of ``kind``."""
    f = kind.generator
    if f is None:
        raise ValueError(
            f"divergence: must have a budget for cvxpy, entered with @budget_of("
            f"{type(kind).__name__}) as in solvers/_divergence_budget.py; got {kind.spec!r}"
        )
    left = left_side(row, f)
    if not isinstance(row.z, float):  # a variable: tokens with q = 0 may have mass
        left = left + f.slope_at_infinity * row.z
    unit_price, spent = torch.tensor([1.0, delta], dtype=torch.float64)
    weight = float(kind.price_from_generator(unit_price, spent))
    return Budget([left <= generator_budget(kind, delta)], weight=weight)


@budget_of(MaxDivergence)
def _max_divergence(row: Scaled, kind: MaxDivergence, delta: float) -> Budget:
    most = most_of(kind, delta) * row.q
    return Budget([row.w <= most / row.s], weight=most / row.s)


def power_weights(row: Scaled, a: float) -> np.ndarray:
    return row.q * (row.s / row.q) ** a


@budget_of(Renyi)
def _renyi_budget(row: Scaled, kind: Renyi, delta: float) -> Budget:
    r"""Return the budget D ≤ δ as Σ h^a q^{1−a} ≤ R (a > 1) or ≥ R (a < 1), with R = e^{(a−1)δ}.

    For a > 1 both sides are divided by R. Mass z on q = 0 appears in no term of the sum.
    """
    a = kind.a
    right = math.exp(min((a - 1) * delta, LARGEST_EXPONENT))
    unit = max(right, 1.0)
    powers = (power_weights(row, a) / unit) @ power(row.w, a)
    return Budget(
        [powers <= right / unit if a > 1 else powers >= right / unit],
        weight=abs(a - 1) * right / unit,  # |d(R/unit)/dδ|: the dual is R/unit's price
        multiplier=abs(a * (a - 1)) / unit,
        tilt=1 / (a - 1),
    )
