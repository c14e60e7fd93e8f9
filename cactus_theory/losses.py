r"""Losses for training a draft, per row and from logits: distillation, and lossless acceptance.

q is the target's row and p the draft's row. Logits are (..., V) of any float dtype; sums are
float32 or wider. If drafts are sampled at a temperature, divide the logits by the temperature
first. Target logits of −∞ belong to tokens that the target never emits. No gradient reaches the
target.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import tensors

__all__ = ["forward_kl", "overlap", "total_variation"]

# the draft's logits must have the target's shape; a plain Tensor leaves this check to the functions
Logits = Float[Tensor, "*rows vocab"]
PerRow = Float[Tensor, "*rows"]


def overlap(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return Σ min(q, p), the probability that lossless verification accepts a token, (...).

    Raises
    ------
    ValueError
        Shapes of the logits that differ.
    TypeError
        Logits that are not floats.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> round(float(overlap(q, p)), 6)
    0.5
    """
    q, p = (rows.exp() for rows in _log_rows(target_logits, draft_logits))
    return torch.minimum(q, p).sum(-1)


def total_variation(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return 1 − Σ min(q, p), the probability that lossless verification rejects a token, (...).

    The gradient vanishes where p has almost no mass on q's tokens. Raises as :func:`overlap`.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> round(float(total_variation(q, p)), 6)
    0.5
    """
    return 1 - overlap(target_logits, draft_logits)


def forward_kl(target_logits: Logits, draft_logits: Tensor) -> PerRow:
    """Return KL(q‖p) in nats, (...), the loss of distillation. Raises as :func:`overlap`.

    Examples
    --------
    >>> q, p = torch.tensor([0.2, 0.2, 0.6]).log(), torch.tensor([0.45, 0.45, 0.1]).log()
    >>> print(f"{forward_kl(q, p):.4f}")
    0.7507
    """
    log_q, log_p = _log_rows(target_logits, draft_logits)
    q = log_q.exp()
    terms = q * (log_q - log_p)
    if bool((q == 0).any()):  # 0 · −∞ would be NaN
        terms = torch.where(q > 0, terms, 0.0)
    return terms.sum(-1)


def _log_rows(target_logits: Logits, draft_logits: Tensor) -> tuple[Logits, Logits]:
    """Return ln q without gradient, and ln p, in float32 or wider."""
    for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
        if not (isinstance(logits, Tensor) and logits.is_floating_point()):
            raise TypeError(
                f"{name}: must be a tensor of floats; got {getattr(logits, 'dtype', type(logits))}"
            )
        if not logits.ndim or not logits.shape[-1]:
            raise ValueError(f"{name}: needs a last axis of tokens; got {tensors.describe(logits)}")
    if target_logits.shape != draft_logits.shape:
        raise ValueError(
            f"draft_logits: shape must equal that of target_logits {tuple(target_logits.shape)}; "
            f"got {tuple(draft_logits.shape)}"
        )
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    return target_logits.detach().to(wide).log_softmax(-1), draft_logits.to(wide).log_softmax(-1)
