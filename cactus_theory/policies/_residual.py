"""The law of the recovered token after a refusal, as data."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# lossless sampling's own scale
UNSCALED = 1.0


@dataclass(frozen=True)
class Residual:
    """Rows ∝ (s·q − p)₊ with one scale s a row, or rows given as they are.

    Attributes
    ----------
    scale : (N,) float64, or one number for all; None where the rows are given.
    rows : (N, V), proportional to the recovery law; they need not sum to 1.
    """

    scale: Float[Tensor, "rows"] | float | None = None
    rows: Float[Tensor, "rows vocab"] | None = None

    def law(
        self,
        q: Float[Tensor, "rows vocab"],
        p: Float[Tensor, "rows vocab"] | None,
        n: Int[Tensor, "rows"],
        out: Tensor | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return rows proportional to the recovery law, in the precision of q.

        ``p`` None stands for a draft certain of the token n. ``out`` is memory to write into.
        Where nothing is left (rounding reaches it, or nothing can be refused) the row is q.
        """
        if self.rows is not None:
            return self.rows
        if isinstance(self.scale, float) and self.scale == UNSCALED and p is not None:
            return residual_or(torch.sub(q, p, out=out), q)
        difference = torch.mul(q, self._column(q.dtype), out=out)
        if p is None:  # certain of n, which was refused
            difference.scatter_(-1, n[:, None], 0.0)
        else:
            difference.sub_(p)
        return residual_or(difference, q)

    def _column(self, dtype: torch.dtype) -> Float[Tensor, "rows 1"] | float:
        assert self.scale is not None
        return self.scale.to(dtype)[:, None] if isinstance(self.scale, Tensor) else self.scale

    def scale_at(self, entry: int) -> float:
        """Return the scale of one row."""
        assert self.scale is not None
        return float(self.scale[entry]) if isinstance(self.scale, Tensor) else self.scale

    def at(self, index: Tensor) -> "Residual":
        """Return the residual of some of the rows."""
        if self.rows is not None:
            return Residual(rows=self.rows[index])
        return Residual(scale=self.scale[index] if isinstance(self.scale, Tensor) else self.scale)


@dataclass(frozen=True)
class Decision:
    """What a policy decides about N drafted tokens, each with its coin.

    Attributes
    ----------
    kept : (N,) whether the token is kept.
    residual : for every token that was refused (ignored for the others); None if the policy
        knows that all were kept.
    """

    kept: Bool[Tensor, "rows"]
    residual: Residual | None


def residual_or(difference: Tensor, fallback: Tensor) -> Tensor:
    """Return the positive part of ``difference`` (..., V), or ``fallback`` rows if it is empty.

    Works in the memory of ``difference``. The rows are not normalised; NaN stays NaN.
    """
    positive = difference.clamp_(min=0.0)
    total = positive.sum(-1, keepdim=True)
    if not positive.is_cuda and float(total.amin()) > 0:
        return positive
    return torch.where(total <= 0, fallback, positive)
