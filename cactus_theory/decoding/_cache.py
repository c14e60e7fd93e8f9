"""Keys and values of a batch in memory taken once, with a length per row.

Every layer owns room for ``capacity`` positions a row at an address that never changes. What
lies behind a row's length is never read and is overwritten by the next forward pass, so a
rollback is one assignment. :class:`RowLayer` shows one row to a Hugging Face model under the
layer protocol of its caches.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check

States = Float[Tensor, "one heads new width"]
ATTENTION_LAYERS = ("full_attention", "sliding_attention")


class RaggedCache:
    """Keys and values of every layer, (B, capacity, heads, width) each.

    Attributes
    ----------
    lengths : cached positions of each row.
    keys, values : one tensor a layer, None until the first states tell their shape.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def take(self, layer: int, heads: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer, taken at the first call.

        It starts as zeros: masked positions still enter a sum, with weight 0.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.batch, self.capacity, heads, width)
            keys = self.keys[layer] = like.new_zeros(shape)
            values = self.values[layer] = like.new_zeros(shape)
        return keys, values

    def rollback(self, row: int, length: int) -> None:
        """Keep the first ``length`` positions of a row; nothing is copied.

        Raises
        ------
        ValueError
            A length that is negative or exceeds what is cached.
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"length: must lie in [0, {self.lengths[row]}]; got {length}")
        self.lengths[row] = length

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order; a row that changes its place is copied.

        Rows must be given so that none is overwritten before it is copied:
        ``rows[place] >= place``.
        """
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is None or values is None:
                continue
            for place, row in enumerate(rows):
                if place != row:
                    used = slice(0, self.lengths[row])
                    keys[place, used] = keys[row, used]
                    values[place, used] = values[row, used]
            self.keys[layer], self.values[layer] = keys[: len(rows)], values[: len(rows)]
        self.lengths[:] = [self.lengths[row] for row in rows]
        self.batch = len(rows)


class RowLayer:
    """One layer of one row, as a Hugging Face model asks for it.

    Hands the model views of the first ``length`` positions. Ordinary causal attention then
    applies: no mask for one token, the library's own causal (and sliding-window) mask for
    several tokens behind a prefix.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: RaggedCache, layer: int, row: int) -> None:
        self.cache, self.layer, self.row = cache, layer, row
        self.length = 0

    @property
    def is_initialized(self) -> bool:
        """Return whether memory has been taken, which the first update does."""
        return self.cache.keys[self.layer] is not None

    def lazy_initialization(self, key_states: States, value_states: States) -> None:
        """Take memory in the shape, dtype and device of the first states."""
        self.cache.take(self.layer, key_states.shape[1], key_states.shape[3], key_states)

    def update(
        self, key_states: States, value_states: States, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states behind ``length`` and return views of everything up to them."""
        _, heads, new, width = key_states.shape
        keys, values = self.cache.take(self.layer, heads, width, key_states)
        end = self.length + new
        if end > self.cache.capacity:
            raise ValueError(
                f"key_states: the cache holds {self.cache.capacity} positions; got position {end}"
            )
        one = slice(self.row, self.row + 1)
        keys[one, self.length : end] = key_states.transpose(1, 2)
        values[one, self.length : end] = value_states.transpose(1, 2)
        self.length = end
        return keys[one, :end].transpose(1, 2), values[one, :end].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys the next forward pass sees, and their offset 0."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached positions."""
        return self.length

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older releases

    def reset(self) -> None:
        """Forget every position and keep the memory."""
        self.length = 0


def row_cache(cache: RaggedCache, row: int) -> Any:
    """Return a ``transformers`` cache that shows one row of ``cache``."""
    library = check.optional_module("transformers.cache_utils", "llm")
    library.CacheLayerMixin.register(RowLayer)
    layers = [RowLayer(cache, layer, row) for layer in range(len(cache.keys))]
    return library.Cache(layers=layers)


def allocate(model: Any, batch: int, capacity: int) -> RaggedCache:
    """Return a cache for a causal LM, (B, capacity) positions.

    Raises
    ------
    ValueError
        A model with layers other than full or sliding-window attention, whose state cannot
        be rolled back.
    """
    config = text_config(model)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_LAYERS:
            raise ValueError(
                f"model: every layer must be one of {', '.join(ATTENTION_LAYERS)}; got {kind!r}"
            )
    return RaggedCache(config.num_hidden_layers, batch, capacity)


def text_config(model: Any) -> Any:
    """Return the part of a model's configuration that describes its text decoder."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
