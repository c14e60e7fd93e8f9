"""A key/value cache of fixed size whose rollback is one assignment.

Every layer owns room for ``capacity`` positions and hands the model a view of the first
``length`` of them. Ordinary causal attention then applies: no mask for one token, the
library's own causal (and sliding-window) mask for several tokens behind a prefix. Positions
behind ``length`` are never read; the next forward pass overwrites them.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check

States = Float[Tensor, "batch heads new width"]
ATTENTION_LAYERS = ("full_attention", "sliding_attention")


class PreallocatedLayer:
    """Keys and values of one attention layer, (B, heads, capacity, width) each.

    Follows the layer protocol of ``transformers.cache_utils`` without importing it.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """Return whether memory has been taken, which the first update does."""
        return self.keys is not None

    def lazy_initialization(self, key_states: States, value_states: States) -> None:
        """Take memory in the shape, dtype and device of the first states."""
        self.keys = _room(key_states, self.capacity)
        self.values = _room(value_states, self.capacity)

    def update(
        self, key_states: States, value_states: States, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states behind ``length`` and return views of everything up to them."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            raise ValueError(
                f"key_states: the cache holds {self.capacity} positions; got position {end}"
            )
        keys, values = self.keys, self.values
        keys[:, :, self.length : end] = key_states  # type: ignore[index]
        values[:, :, self.length : end] = value_states  # type: ignore[index]
        self.length = end
        return keys[:, :, :end], values[:, :, :end]  # type: ignore[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys the next forward pass sees, and their offset 0."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached positions."""
        return self.length

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in older releases

    def reset(self) -> None:
        """Forget every position and keep the memory."""
        self.length = 0


def allocate(model: Any, capacity: int) -> Any:
    """Return a ``transformers`` cache of ``capacity`` positions for a causal LM.

    Raises
    ------
    ValueError
        A model with layers other than full or sliding-window attention, whose state cannot
        be rolled back.
    """
    library = check.optional_module("transformers.cache_utils", "llm")
    library.CacheLayerMixin.register(PreallocatedLayer)
    config = text_config(model)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_LAYERS:
            raise ValueError(
                f"model: every layer must be one of {', '.join(ATTENTION_LAYERS)}; got {kind!r}"
            )
    layers = [PreallocatedLayer(capacity) for _ in range(config.num_hidden_layers)]
    return library.Cache(layers=layers)


def rollback(cache: Any, length: int) -> None:
    """Keep the first ``length`` positions; nothing is copied.

    Raises
    ------
    ValueError
        A length that is negative or exceeds what is cached.
    """
    for layer in cache.layers:
        if not 0 <= length <= layer.length:
            raise ValueError(f"length: must lie in [0, {layer.length}]; got {length}")
        layer.length = length


def text_config(model: Any) -> Any:
    """Return the part of a model's configuration that describes its text decoder."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _room(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, width = states.shape
    return torch.empty(batch, heads, capacity, width, dtype=states.dtype, device=states.device)
