"""Sample from the target and accept the drafted token if it is the same: the exact baseline."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.policies._decisions import Budget, Declaration
from cactus_theory.policies._policy import Entries, Id, Ids, Policy, Rows, normalised_or
from cactus_theory.policies._registry import register


@register("sample_and_match")
@dataclass(frozen=True)
class SampleAndMatch(Policy):
    r"""Draw x from q by itself and emit it; the drafted token is accepted iff it is x.

    .. math:: φ(n) = q_n, \qquad g(x|n) = q_x 1[x ≠ n]/(1 − q_n)

    Lossless, whatever the draft; accepts :math:`Σ p_i q_i ≤ 1 − \mathrm{TV}(p, q)`, which is
    what lossless sampling gains by looking at p. The way of engines without rejection sampling,
    and of any decode that compares drafts with the target's own samples.
    """

    def bounds(self, q_n: Entries, p_n: Entries) -> tuple[Entries, Entries]:
        """Return φ: the rest of the row is not needed."""
        return (accepted := self.accept_entries(q_n)), accepted

    @property
    def declares(self) -> Declaration:
        """Return: lossless; accepts Σ p q, at most what speculative does."""
        return Declaration(budget=Budget("kl", 0.0, "emitted"), between=True)

    def accept_entries(self, q_n: Entries) -> Entries:
        """Return φ from float64 entries of q: themselves."""
        return q_n

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return φ, which reads q_n alone."""
        return self.accept_entries(ungraphed(q).gather(-1, n).double())

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return q without n, normalised; q where n is deterministic."""
        (q,) = float64_rows(q)
        return normalised_or(q.scatter(-1, n[..., None], 0.0), q)

    def emitted(self, q: Rows, p: Rows) -> Rows:
        """Return q itself."""
        return float64_rows(q)[0]
