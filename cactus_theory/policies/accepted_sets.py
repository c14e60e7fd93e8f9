"""Accept a set of tokens that the target's row decides: its likeliest ones."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.base.arguments import float64_rows, ungraphed
from cactus_theory.policies._base_classes import SharedResidual
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._policy import TIE, Id, Ids, Rows, normalised_or, one_hot
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


@register("relaxed")
@dataclass(frozen=True)
class Relaxed(AmongTop):
    r"""Accept n iff it is among the k largest of q and :math:`q_n ≥ \max q − δ`, positive, too.

    After a refusal a draw from q, or the likeliest token (smallest index on ties). Bounds no
    divergence, is not between p and q, and may accept less than lossless sampling. At k = 1 it
    accepts the likeliest token alone: lossless where the target is greedy, and nowhere else.
    Tokens that tie for the k-th place are all accepted; an engine accepts k.

    Engines relax the thinking section only: ``Between(relaxed, opening=…, closing=…)``.
    TensorRT-LLM: k=1, delta=0, in its example 10, 0.01; Modular MAX: 10, 0.6; ATOM: 10, 0.6 where
    it is switched on, 8, 0.5 before. TensorRT-LLM and ATOM emit the likeliest token after a
    refusal (``recover=argmax``). They also accept tokens of probability 0 if δ admits them; this
    policy does not. Source: documentation of ``MTPDecodingConfig`` (TensorRT-LLM) and
    ``SpeculativeConfig`` (MAX), ``rejection_sampler.py`` (ATOM).
    """

    k: int = 10
    delta: float = 0.6
    recover: str = "target"
    knob = "delta"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delta", check.number("delta", self.delta, 0))
        check.one_of("recover", self.recover, ("argmax", "target"))

    @property
    def declares(self) -> Declaration:
        """Return: no budget; acceptance grows with δ."""
        return super().declares

    def chosen(self, q: Rows) -> Bool[Tensor, "*batch vocab"]:
        """Return which tokens are accepted."""
        rows = q.double()
        least = rows.amax(-1, keepdim=True) * (1 - TIE) - self.delta
        return super().chosen(q) & (rows >= least)


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
