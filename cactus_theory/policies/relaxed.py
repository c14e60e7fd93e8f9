"""Relaxed acceptance of serving engines: among the k likeliest, and not far below the likeliest."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.policies._decisions import Declaration
from cactus_theory.policies._policy import TIE, Rows
from cactus_theory.policies._registry import register
from cactus_theory.policies.top_k import AmongTop


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
