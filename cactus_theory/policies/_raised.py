"""Rules that test against a raised target and recover as lossless sampling does."""

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies._base import (
    FixedTarget,
    Ids,
    Rows,
    keep_probability,
    normalised_or,
)


class RaisedTest(FixedTarget):
    r"""Keep n with min(1, r(q_n)/p_n), r(q_n) ≥ q_n; recover from (q − p)₊ normalised.

    The emitted law is min(p, r(q)) + (1 − A)(q − p)₊/TV(p, q), pointwise between p and q, and
    A = Σ min(p, r(q)): lossless sampling on that law as a fixed target does the same.
    """

    @abstractmethod
    def raised(self, q_n: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return r(q_n), at least q_n and 0 where q_n = 0; float64."""

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return min(1, r(q_n)/p_n): only the drafted entries are read."""
        raised = self.raised(q.gather(-1, n).double())
        return raised.clamp(max=1.0) if p is None else keep_probability(raised, p.gather(-1, n))

    def target(self, q: Rows, p: Rows) -> Rows:
        """Return what is emitted."""
        kept = p.minimum(self.raised(q))
        lost = (p - kept).sum(-1, keepdim=True)
        return kept + lost * self.recovery_row(q, p)

    def recovery_row(self, q: Rows, p: Rows) -> Rows:
        """Return (q − p)₊ normalised, q where the rows are equal."""
        return normalised_or((q - p).clamp(min=0.0), q)
