"""Typical acceptance, the entropy-dependent threshold of Medusa and early vLLM."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies._base import TIE, Ids, Rows, SharedRecovery, draft_row
from cactus_theory.policies._declaration import Declaration
from cactus_theory.policies._registry import register


@register("typical")
@dataclass(frozen=True)
class Typical(SharedRecovery):
    r"""Keep n iff :math:`q_n > \min(ε, α e^{-H(q)})`, whatever the draft thought of it.

    Recovers the most likely token of q (smallest index on ties) or a draw from q. Bounds
    no divergence, is not between p and q, and may accept less than lossless sampling.
    alpha defaults to √ε. Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section 2.3.1.
    """

    epsilon: float = 0.09
    alpha: float | None = None
    recover: str = "argmax"
    knob = "epsilon"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check.number("epsilon", self.epsilon, 0, 1))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check.number("alpha", self.alpha, 0))
        check.one_of("recover", self.recover, ("argmax", "target"))

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as the threshold rises."""
        return Declaration(direction=-1, continuous=False)

    def threshold(self, q: Rows) -> Float[Tensor, "*batch 1"]:
        """Return min(ε, α e^{−H(q)}) of each row."""
        rows = q.double()
        alpha = self.epsilon**0.5 if self.alpha is None else self.alpha
        entropy = -torch.xlogy(rows, rows).sum(-1, keepdim=True)
        return (alpha * (-entropy).exp()).clamp(max=self.epsilon)

    def acceptance(self, q: Rows, p: Rows | None, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return 1 where q_n exceeds the threshold, else 0."""
        return (q.gather(-1, n).double() > self.threshold(q) * (1 + TIE)).double()

    def recovery_row(self, q: Rows, p: Rows) -> Rows:
        """Return the one-hot row of the likeliest token, or q."""
        return draft_row(q, None, q.argmax(-1)) if self.recover == "argmax" else q
