"""From scores to rows, at any temperature and for rows that have no law."""

import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

# Between these a score is divided as it is. Colder, float32 has not the digits for quotients that
# differ by less than 1 (scores of 30 are 3e4 at 1e-3, known to 2e-3), and overflows below 1e-37;
# hotter, the temperature itself does.
ORDINARY = (1e-3, 1e30)
# how near 1 a row of half precision sums that is a distribution
NEAR_ONE = 1e-2


def scaled(
    scores: Float[Tensor, "*rows vocab"], temperature: float, out: Tensor | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return scores / temperature, up to a shift of each row, for a softmax.

    Outside of ``ORDINARY`` differences from the row's largest score are divided, in float64:
    exact for every positive temperature that a float holds. As it falls the rows become those
    of greedy decoding, where ties share; as it rises, uniform over the scores above −∞.
    """
    if ORDINARY[0] <= temperature <= ORDINARY[1]:
        return torch.div(scores, temperature, out=out)
    wide = scores.double()
    divided = (wide - wide.amax(-1, keepdim=True)).div_(temperature)
    return divided.to(scores.dtype) if out is None else out.copy_(divided)


def greedy(
    scores: Float[Tensor, "*rows vocab"], out: Tensor | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Return 1 at the largest score of each row, the first one on ties, 0 elsewhere.

    As a softmax does, a row with NaN, or without a score above −∞, gives NaN throughout.
    """
    most, best = scores.max(-1, keepdim=True)
    rows = torch.empty_like(scores) if out is None else out
    rows.zero_().scatter_(-1, best, 1.0)
    if most.is_cuda or not float(most.min()) > -math.inf:  # NaN is the least, too
        rows.masked_fill_(~(most > -math.inf), math.nan)
    return rows


def warn_of_probabilities(name: str, scores: Float[Tensor, "vocab"]) -> None:
    """Warn if a row of what should be logits is a distribution; ``name`` is where it is from."""
    row = scores.double()
    if bool(((row >= 0) & (row <= 1)).all()) and abs(float(row.sum()) - 1) < NEAR_ONE:
        warnings.warn(
            f"{name}: holds probabilities where logits belong: a row in [0, 1] that sums to "
            f"{float(row.sum()):.4g}, whose softmax is nearly uniform; their logarithms would do",
            stacklevel=2,
        )
