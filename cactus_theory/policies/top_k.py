"""Accept a set of tokens that the target's row decides: its k likeliest ones."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.policies._base_classes import SharedResidual
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._policy import Id, Ids, Rows, normalised_or, one_hot
from cactus_theory.policies._registry import register


class AcceptedSet(SharedResidual):
    """Accept n iff it is in a set of tokens; emit the likeliest, or a draw from q, if refused.

    ``recover`` says which, ``argmax`` (the smallest index on ties) or ``target``.
    """

    recover: str = "argmax"

    @abstractmethod
    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""

    def acceptance(self, q: Rows, p: Rows, n: Ids) -> Float[Tensor, "*batch m"]:
        """Return 1 for the accepted tokens, 0 for the others."""
        return self.chosen(ungraphed(q)).gather(-1, n).double()

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the one-hot row of the likeliest token, or q."""
        if self.recover == "argmax":
            return one_hot(q.argmax(-1), q).double()
        return float64_rows(q)[0]


@dataclass(frozen=True)
class AmongTop(AcceptedSet):
    """Accept n iff q_n is at least the k-th largest entry of q and positive; ties are accepted."""

    k: int
    knob = "k"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check.as_whole_number("k", self.k, 1))

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance grows with k."""
        return Declaration(direction=1, continuous=False)

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""
        least = q.topk(min(self.k, q.shape[-1]), -1).values[..., -1:]
        return (q >= least) & (q > 0)


@register("top_k")
@dataclass(frozen=True)
class TopK(AmongTop):
    r"""Accept n iff it is among the target's k likeliest tokens (ties accepted, q_n > 0).

    Recovers on that set: from q renormalised (``target``), evenly however unlikely its members
    (``uniform``), or :math:`∝ 1 − p_v` (``draft``), as the published code does. (That code also
    accepts tokens with q = 0 where k exceeds the support; this policy does not.) Bounds no
    divergence, is not between p and q, and may accept less than lossless sampling. Source: the
    top-k baseline of Hao & Mou 2026 (arXiv 2604.04987) and its repository.
    """

    recover: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of("recover", self.recover, ("target", "uniform", "draft"))

    def residual(self, q: Rows, p: Rows, n: Id) -> Rows:
        """Return the weights of the accepted tokens, normalised; q where they are 0 everywhere."""
        q, p = float64_rows(q, p)
        if self.recover == "target":
            weights = q
        else:
            weights = 1 - (0 * q if self.recover == "uniform" else p)
        return normalised_or(torch.where(self.chosen(q), weights.clamp(min=0.0), 0.0), q)
