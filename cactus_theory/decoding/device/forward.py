"""A forward pass over the ragged cache for tokens whose places only the device knows."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache import Places, additive
from cactus_theory.decoding.models.fast import FastForward


class StaticForward:
    """The pass of :class:`FastForward`, where positions are tensors instead of host numbers.

    It shares the model's weights and cache. What it writes beyond a text's length is never
    seen: a position attends to slots up to its own, and a later round writes there again.
    """

    def __init__(self, model: CachedModel) -> None:
        if not isinstance(model.forward, FastForward):
            raise ValueError("model: must run in the fast pass; got the library's")
        self.fast = model.forward

    def __call__(
        self,
        token_ids: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        end: int,
        *,
        last: bool = False,
    ) -> Float[Tensor, "batch some vocab"]:
        """Return the logits after each token, or after the last one of a row only.

        Token j of row b is written to slot ``positions[b, j]`` and attends to the slots up to
        it; ``end`` is more than every position that matters.
        """
        fast, (batch, new) = self.fast, token_ids.shape
        x = F.embedding(token_ids.reshape(-1), fast.embedding)
        flat = positions.reshape(-1)
        cos, sin = fast.cos[flat], fast.sin[flat]
        slots = torch.arange(end, device=positions.device)
        mask = fast.stacked(additive(slots > positions[..., None], x)[:, None])
        rows = torch.arange(batch, device=positions.device)[:, None]
        at = Places(slice(0, batch), 0, end, (rows, positions))
        for number, layer in enumerate(fast.layers):
            x = layer(x, (batch, new), cos, sin, fast.memory(number, layer, x), at, mask)
        hidden = fast.norm(x).view(batch, new, -1)
        hidden = hidden[:, -1:] if last else hidden
        return fast.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
