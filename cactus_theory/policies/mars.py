"""Margin-aware verification: a greedy target's runner-up is accepted if its logit is near."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.policies._base import Id, Ids, Policy, Rows, one_hot
from cactus_theory.policies._declaration import Declaration
from cactus_theory.policies._registry import register


@register("mars")
@dataclass(frozen=True)
class Mars(Policy):
    r"""Keep the target's likeliest token, and the second one where :math:`z_2/z_1 > θ`.

    A ratio of raw logits is no function of the row: adding a constant to all logits changes it
    and leaves q. For z_1 > 0 it says :math:`\ln q_1 − \ln q_2 < (1 − θ) z_1`, a margin in nats
    that a row does have, times a number that it has lost. That number is the knob ``top``: the
    largest raw logit, taken to be the same at every row; 20 is a round number, not your model's.
    :func:`near_runner_up` takes one a row, where the logits are at hand. (Where z_1 < 0 the ratio
    as written accepts every runner-up.)

    Greedy: the likeliest token replaces a refused one. It needs rows of temperature 1 or so; a
    one-hot row has no runner-up. Bounds no divergence. θ is .8 to .97 there, usually .9.
    Source: Song et al. 2026 (arXiv 2601.15498).
    """

    theta: float = 0.9
    top: float = 20.0
    knob = "theta"
    shared_recovery = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", check.number("theta", self.theta, 0, 1))
        object.__setattr__(self, "top", check.number("top", self.top, 0, open_low=True))
        if self.top == float("inf"):
            raise ValueError("top: must be a finite logit; got inf")

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance falls as θ rises."""
        return Declaration(direction=-1, continuous=False)

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return 1 for the likeliest token and a runner-up that is near, else 0."""
        rows = q.double()
        best = rows.argmax(-1, keepdim=True)
        near, second = near_runner_up(rows, torch.full_like(rows[..., 0], self.top), self.theta)
        return ((n == best) | ((n == second[..., None]) & near[..., None])).double()

    def recovery(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the one-hot row of the likeliest token."""
        q = q.double()
        return one_hot(q.argmax(-1), q)


def near_runner_up(
    q: Rows, top: Float[Tensor, "*batch"], theta: float
) -> tuple[Bool[Tensor, "*batch"], Id]:
    """Return whether z_2/z_1 > θ, given z_1 = ``top`` (...) of each row, and the second token.

    As written: where z_1 < 0 every runner-up is near, as z_2/z_1 ≥ 1.
    """
    best = q.argmax(-1, keepdim=True)
    others = q.scatter(-1, best, -1.0)
    second = others.argmax(-1)
    q_2 = others.amax(-1).clamp(min=0.0)
    margin = (q.amax(-1) / q_2).log()
    near = torch.where(top > 0, margin < (1 - theta) * top, torch.ones_like(margin).bool())
    return near & (q_2 > 0), second
