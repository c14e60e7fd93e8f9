"""Keys and values of a batch in memory that is allocated once, with a length per row.

Every layer has room for ``capacity`` positions a row at an address that never changes. Entries
after a row's length are never read and are overwritten by the next forward pass, so a rollback
is one assignment.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

ATTENTION_LAYERS = ("full_attention", "sliding_attention")
LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")


class RaggedCache:
    """Keys and values of every layer, (B, capacity + 1, heads, width) each.

    The place after the last position takes what a forward pass computes for padding.

    Attributes
    ----------
    lengths : cached positions of each row; a list that only the cache's methods write to.
    keys, values : one tensor a layer, None until the first states tell their shape.
    hidden : by layer that somebody reads, hidden states (B, capacity + 1, hidden), which are rolled
        back and moved with the keys.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.hidden: dict[int, Tensor | None] = {}

    def take(
        self, layer: int, heads: int, widths: tuple[int, int], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer's keys and values, taken at the first call.

        It starts as zeros: masked positions still enter a sum, with weight 0.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            room = (self.batch, self.capacity + 1, heads)
            keys = self.keys[layer] = like.new_zeros(*room, widths[0])
            values = self.values[layer] = like.new_zeros(*room, widths[1])
        return keys, values

    def record(self, layer: int, at: Any, states: Float[Tensor, "batch new hidden"]) -> None:
        """Write hidden states of fed tokens at their places, which are those of their keys."""
        memory = self.hidden[layer]
        if memory is None:
            room = self.batch, self.capacity + 1, states.shape[-1]
            memory = self.hidden[layer] = states.new_zeros(room)
        memory[at] = states

    def extend(self, counts: Sequence[int]) -> None:
        """Take up tokens whose keys and values have been written, ``counts[b]`` of row b."""
        self.lengths[:] = map(int.__add__, self.lengths, counts)

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

    def select(self, row: int, length: int, path: Sequence[int]) -> None:
        """Keep the first ``length`` positions of a row, then ``length + i`` for i in ``path``.

        States move so that they are contiguous; a path 0, 1, 2, … copies nothing.

        Raises
        ------
        ValueError
            A length or a path outside what is cached, a path that does not ascend.
        """
        cached = self.lengths[row]
        if not 0 <= length <= cached:
            raise ValueError(f"length: must lie in [0, {cached}]; got {length}")
        steps = list(path)
        if steps != sorted(set(steps)) or any(not 0 <= i < cached - length for i in steps):
            raise ValueError(f"path: must ascend within [0, {cached - length}); got {steps}")
        stay = next((place for place, i in enumerate(steps) if i != place), len(steps))
        self.lengths[row] = length + len(steps)
        if stay < len(steps):
            self._move(row, [length + i for i in steps[stay:]], length + stay)

    def _move(self, row: int, source: list[int], start: int) -> None:
        own = slice(start, start + len(source))
        for states in (*self.keys, *self.values, *self.hidden.values()):
            if states is not None:
                states[row, own] = states[row, torch.tensor(source, device=states.device)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; a row that changes its place is copied.

        Rows must be given so that none is overwritten before it is copied:
        ``rows[place] >= place``.
        """
        self.keys[:] = [self._kept(states, rows) for states in self.keys]
        self.values[:] = [self._kept(states, rows) for states in self.values]
        self.hidden = {layer: self._kept(own, rows) for layer, own in self.hidden.items()}
        self.lengths[:] = [self.lengths[row] for row in rows]
        self.batch = len(rows)

    def _kept(self, states: Tensor | None, rows: Sequence[int]) -> Tensor | None:
        if states is None:
            return None
        for place, row in enumerate(rows):
            if place != row:
                states[place, : self.lengths[row]] = states[row, : self.lengths[row]]
        return states[: len(rows)]


def allocate(model: Any, batch: int, capacity: int) -> RaggedCache:
    """Return a cache for a causal LM, (B, capacity) positions.

    Raises
    ------
    ValueError
        A model with layers other than full or sliding-window attention, whose state cannot
        be rolled back; a configuration that does not say how many layers there are.
    """
    config = text_config(model)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_LAYERS:
            raise ValueError(
                f"model: every layer must be one of {', '.join(ATTENTION_LAYERS)}; "
                f"got {kind!r} in {type(model).__name__}"
            )
    counts = [getattr(config, name, None) for name in LAYER_COUNTS]
    layers = max((count for count in counts if isinstance(count, int)), default=0)
    if not layers:
        raise ValueError(
            f"model: its configuration must say num_hidden_layers; got none in "
            f"{type(model).__name__}"
        )
    return RaggedCache(layers, batch, capacity)


def text_config(model: Any) -> Any:
    """Return the part of a model's configuration that describes its text decoder."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
