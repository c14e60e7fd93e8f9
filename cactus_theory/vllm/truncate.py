"""Truncation of a batch of logits before a policy acts, in vLLM's order: min-p, top-k, top-p."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def truncate_(
    logits: Float[Tensor, "rows vocab"],
    temperature: Float[Tensor, "rows"],
    *,
    min_p: Float[Tensor, "rows"],
    top_k: Int[Tensor, "rows"],
    top_p: Float[Tensor, "rows"],
) -> Float[Tensor, "rows vocab"]:
    """Set logits outside each row's set to −inf, in place; nothing is read on the host.

    The set is that of softmax(l/T): what is at least ``min_p`` times the largest, of these the
    ``top_k`` likeliest with ties (0: all), of these the likeliest whose mass first reaches
    ``top_p``. Rows at temperature 0 are left as they are.
    """
    sampled = temperature > 0
    heat = torch.where(sampled, temperature, 1.0).to(logits.dtype)[:, None]
    rows, order = (logits / heat).sort(-1)
    count = rows.shape[-1]
    least = rows[:, -1:] + min_p.to(rows.dtype)[:, None].log()
    first = torch.where(top_k > 0, count - top_k, 0).clamp(0, count - 1)[:, None]
    cut = (rows < least) | (rows < rows.gather(-1, first))
    mass = rows.masked_fill(cut, -torch.inf).softmax(-1).cumsum(-1)
    tail = (mass <= 1 - top_p.to(rows.dtype)[:, None]) & (top_p < 1)[:, None]
    tail[:, -1] = False
    cut = (cut | tail) & sampled[:, None]
    return logits.masked_fill_(torch.zeros_like(cut).scatter_(-1, order, cut), -torch.inf)
