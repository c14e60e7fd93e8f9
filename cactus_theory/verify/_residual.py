"""Residuals on a CPU: their mass, and the recovered token that a coin draws from one."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float

from cactus_theory.optimum.rows import loops
from cactus_theory.verify.draw import pick_one


class Residual:
    """The row (s q − p)₊ that a recovered token is drawn from, unnormalised.

    Some ids have ``levels`` of their own instead of s. Without ``p`` it is s q, for a bonus token.
    """

    def __init__(
        self,
        q: np.ndarray,
        p: np.ndarray | None = None,
        scale: float = 1.0,
        levels: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        if levels:
            ids, own = [*levels], q[[*levels]] * np.array([*levels.values()])
            q = np.multiply(q, scale, dtype=np.float64)
            q[ids], scale = own, 1.0
        self.q, self.p, self.scale = q, q[:0] if p is None else p, scale

    @property
    def row(self) -> Float[np.ndarray, "vocab"]:
        with np.errstate(invalid="ignore"):  # of ∞, which a draw refuses
            row = self.q.astype(np.float64) * self.scale
            return np.maximum(row - self.p if len(self.p) else row, 0.0)

    @property
    def mass(self) -> float:
        if (compiled := loops()) is None:
            return float(self.row.sum())
        return compiled.left_mass(self.q, self.p, self.scale)

    def draw(self, draw: float) -> int:
        """Return the token that a coin draws, NO_TOKEN where nothing is left."""
        if (compiled := loops()) is None:
            return pick_one(torch.from_numpy(self.row), draw)
        return compiled.draw_left(self.q, self.p, self.scale, draw)
