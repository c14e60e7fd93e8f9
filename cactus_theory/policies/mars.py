"""Margin-aware verification: a greedy target's runner-up is accepted if its logit is near."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._policy import Rows, one_hot
from cactus_theory.policies._registry import register
from cactus_theory.policies.top_k import AcceptedSet


@register("mars")
@dataclass(frozen=True)
class Mars(AcceptedSet):
    r"""Accept the target's likeliest token, and the second one where :math:`z_2/z_1 > θ`.

    A ratio of raw logits is no function of the row: adding a constant to all logits changes it
    and leaves q. For z_1 > 0 it says :math:`\ln q_1 − \ln q_2 < (1 − θ) z_1`, a margin in nats
    that a row does have, times a number that it has lost. That number is the knob ``top``: the
    largest raw logit, taken to be the same at every row; 20 is a round number, not your model's.
    (Where z_1 < 0 the ratio as written accepts every runner-up.)

    Greedy: the likeliest token replaces a refused one. It needs rows of temperature 1 or so; a
    one-hot row has no runner-up. Bounds no divergence. θ is 0.8 to 0.97 there, usually 0.9.
    Source: Song et al. 2026 (arXiv 2601.15498).
    """

    theta: float = 0.9
    top: float = 20.0
    knob = "theta"

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", check.number("theta", self.theta, 0, 1))
        object.__setattr__(self, "top", check.number("top", self.top, 0, open_low=True))
        if self.top == float("inf"):
            raise ValueError("top: must be a finite logit; got inf")

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as θ rises."""
        return Declaration(direction=-1, continuous=False)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return the likeliest token, and a runner-up that is near."""
        q = q.double()
        best = one_hot(q.argmax(-1), q) > 0
        others = q.masked_fill(best, 0.0)
        margin = (q.amax(-1, keepdim=True) / others).log()
        near = margin < (1 - self.theta) * self.top
        return best | (near & (others > 0) & (one_hot(others.argmax(-1), q) > 0))
