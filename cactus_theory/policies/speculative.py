"""Lossless speculative sampling."""

from dataclasses import dataclass

from cactus_theory.policies._base_classes import Raised
from cactus_theory.policies._decisions import Budget, Declaration, Node, Path
from cactus_theory.policies._policy import Entries, Rows
from cactus_theory.policies._registry import register
from cactus_theory.policies._shortcuts import ByRow


class Lossless(ByRow):
    """Shortcuts of lossless sampling: h = q, whichever tokens are deterministic."""

    highest = 1.0

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return q_n/p_n, which is exact."""
        ratio = (q_n / p_n).nan_to_num(nan=0.0)
        return ratio, ratio

    def follow(self, node: Node) -> tuple[float, float, float]:
        """Return P q_n/p_n, and P twice: the residual's scale and P h/q of deterministic tokens."""
        return node.lossless_ratio, node.alive, node.alive


@register("speculative")
@dataclass(frozen=True)
class Speculative(Raised):
    """Accept n with min(1, q_n/p_n): the emitted law is q, exactly.

    Source: Leviathan et al. 2023; Chen et al. 2023.
    """

    shortcuts = Lossless()

    @property
    def declares(self) -> Declaration:
        """Return: lossless."""
        budget = Budget("kl", 0.0, "emitted")
        return Declaration(budget=budget, between=True, at_least_speculative=True)

    def ceiling(self, q_n: Entries, p_n: Entries) -> Entries:
        """Return q_n."""
        return q_n

    def target(self, q: Rows, p: Rows, path: Path | None = None) -> Rows:
        """Return q."""
        return q
