r"""Bound a program with many constraints from above, token by token, at any multipliers.

.. math:: \max_h Σ_i \min(c_i, h_i) \;\text{ s.t. }\; l \le h \le u,\;
   Σ q f_k(h/q) \le δ_k,\; Ah \le b

Whatever λ ≥ 0 and ν ≥ 0 (any sign for equations) a solver returns, the value is at most

.. math:: λᵀδ + νᵀb + Σ_i \sup_{l_i \le h \le u_i}
   [\min(c_i, h) − Σ_k λ_k q_i f_k(h/q_i) − (Aᵀν)_i h]

and each supremum is of a concave function of one number, found by halving. Source: Boyd &
Vandenberghe 2004, 5.1.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from cactus_theory.divergences import FDivergence

# the bracket [0, 1] shrinks to 2^-100; the value is then exact to rounding
HALVINGS = 100


@dataclass
class Lagrangian:
    """What the constraints of a program contribute at given multipliers.

    Attributes
    ----------
    q, cap : (m,) the target on tokens with q > 0 and the caps c of the reward.
    low, high : (m,) the box that the row is known to stay in.
    linear, constant : (m,) Aᵀν and the number λᵀδ + νᵀb.
    costs : multiplier λ_k and generator f_k of each divergence.
    """

    q: np.ndarray
    cap: np.ndarray
    low: np.ndarray
    high: np.ndarray
    linear: np.ndarray
    constant: float = 0.0
    costs: list[tuple[float, FDivergence]] = field(default_factory=list)

    @classmethod
    def of(cls, q: np.ndarray, cap: np.ndarray) -> "Lagrangian":
        """Return the program without constraints."""
        return cls(q, cap, np.zeros_like(q), np.ones_like(q), np.zeros_like(q))

    def add_linear(self, multiplier: float, row: np.ndarray | float, right: float) -> None:
        """Charge ``multiplier`` for each unit of row·h above ``right``."""
        self.linear = self.linear + multiplier * row
        self.constant += multiplier * right

    def add_divergence(self, multiplier: float, f: FDivergence, amount: float) -> None:
        """Charge ``multiplier`` for each unit of Σ q f(h/q) above ``amount``."""
        if multiplier > 0 and math.isfinite(amount):
            self.costs.append((multiplier, f))
            self.constant += multiplier * amount

    def narrow(self, low: np.ndarray | float, high: np.ndarray | float) -> None:
        """Keep the row within ``low`` and ``high`` as well."""
        self.low, self.high = np.maximum(self.low, low), np.minimum(self.high, high)

    def bound(self) -> float:
        """Return the upper bound on the program's value."""
        low, high = self.low.copy(), np.maximum(self.low, self.high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            rising = self._slope(middle) > 0
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        top = np.maximum(self.low, self.high)
        kinks = (np.clip(row, self.low, top) for row in (self.cap, self.q))
        values = [self._value(h) for h in (low, high, self.low, top, *kinks)]
        return self.constant + float(np.max(values, axis=0).sum())

    def _value(self, h: np.ndarray) -> np.ndarray:
        ratio = torch.from_numpy(h / self.q)
        paid = sum(price * self.q * f.f(ratio).numpy() for price, f in self.costs)
        return np.minimum(self.cap, h) - self.linear * h - paid

    def _slope(self, h: np.ndarray) -> np.ndarray:
        ratio = torch.from_numpy(h / self.q)
        paid = sum(price * f.slope(ratio).numpy() for price, f in self.costs)
        return (h < self.cap) - self.linear - paid
