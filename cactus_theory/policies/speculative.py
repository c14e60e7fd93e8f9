"""Lossless speculative sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cactus_theory.optimum.rows import NodeRow
from cactus_theory.policies._base_classes import Raised
from cactus_theory.policies._decisions import Budget, Declaration, Path
from cactus_theory.policies._policy import Entries, Rows
from cactus_theory.policies._registry import register


@register("speculative")
@dataclass(frozen=True)
class Speculative(Raised):
    """Accept n with min(1, q_n/p_n): the emitted law is q, exactly.

    Source: Leviathan et al. 2023; Chen et al. 2023.
    """

    highest = 1.0

    @property
    def declares(self) -> Declaration:
        """Return: lossless."""
        budget = Budget("kl", 0.0, "emitted")
        return Declaration(budget=budget, between=True, at_least_speculative=True)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return q_n."""
        return q_n

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return q_n/p_n, which is exact."""
        ratio = (q_n / p_n).nan_to_num(nan=0.0)
        return ratio, ratio

    def row(
        self, q: np.ndarray, p: np.ndarray, alive: float = 1.0, certain: Sequence[int] = ()
    ) -> NodeRow:
        """Return q, whichever tokens are deterministic."""
        return NodeRow(alive)

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return q."""
        return q
