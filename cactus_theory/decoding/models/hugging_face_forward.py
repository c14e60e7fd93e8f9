"""Transformers' forward pass of a causal LM over a batch of rows of different lengths.

A ragged batch runs as one call of the model. Every layer writes each row's new states at the row's
length and returns the slots up to the end of the longest row. Position ids and a mask
(B, 1, new, end), which transformers' mask functions return unchanged, say which slots belong to
each row. Rows of equal length need no ids and no mask: the model makes a causal mask.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding.models.cache import (
    Fed,
    RaggedCache,
    Sight,
    Slots,
    additive,
    block,
    slots_of,
    text_config,
)

Keys = Float[Tensor, "batch heads new width"]
Values = Float[Tensor, "batch heads new wide"]
FULL, SLIDING = "full_attention", "sliding_attention"


class _Layer:
    """A layer of the cache with the interface that a ``transformers`` model expects.

    The states are in the cache; :class:`LibraryForward` sets the slots to use before each pass.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: RaggedCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.show(block(0, 0))

    def show(self, slots: Slots) -> None:
        self.slots, self.length = slots, slots.start

    @property
    def is_initialized(self) -> bool:
        return self.cache.keys[self.layer] is not None

    def lazy_initialization(self, key_states: Keys, value_states: Values) -> None:
        widths = key_states.shape[3], value_states.shape[3]
        self.cache.take(self.layer, key_states.shape[1], widths, key_states)

    def update(
        self, key_states: Keys, value_states: Values, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        widths = key_states.shape[3], value_states.shape[3]
        keys, values = self.cache.take(self.layer, key_states.shape[1], widths, key_states)
        at = self.slots
        keys[at.index] = key_states.transpose(1, 2)
        values[at.index] = value_states.transpose(1, 2)
        self.length = at.end
        return keys[:, : at.end].transpose(1, 2), values[:, : at.end].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys in the next forward pass, and the keys' offset 0."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of slots in use; after a pass the fed tokens are included."""
        return self.length

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # name in older releases of transformers

    def reset(self) -> None:
        self.show(block(0, 0))


class LibraryForward:
    """Transformers' forward pass of a causal LM, with keys and values in a :class:`RaggedCache`.

    Ragged batches and trees run in one call, for models that accept our attention mask.
    """

    def __init__(self, model: Any, cache: RaggedCache) -> None:
        self.model, self.cache = model, cache
        library = check.optional_module("transformers.cache_utils", "llm")
        # transformers' Cache asks only layers of this class for their lengths and mask sizes
        library.CacheLayerMixin.register(_Layer)
        self.layers = [_Layer(cache, layer) for layer in range(len(cache.keys))]
        self.shown = library.Cache(layers=self.layers)
        self.slices = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.masks = mask_kinds(model)
        self.dtype = model.dtype

    def __call__(
        self, token_ids: Fed, counts: Sequence[int], keep: Sequence[int], parents: Fed | None = None
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return the logits after the last ``keep[b]`` of the ``counts[b]`` tokens fed to row b.

        These logits come first in row b of the result; further entries are arbitrary. The tokens'
        keys and values are written; the cache's lengths do not change.
        """
        new = token_ids.shape[1]
        slots = slots_of(self.cache, new, counts, parents, token_ids.device)
        keep = [min(count, kept) for count, kept in zip(counts, keep, strict=True)]
        first = [count - kept for count, kept in zip(counts, keep, strict=True)]
        for layer in self.layers:
            layer.show(slots)
        options: dict[str, Any] = {}
        if slots.sight is not None:
            options["position_ids"] = slots.sight.positions
            options["attention_mask"] = self._mask(slots.sight)
        if self.cache.hidden:
            options["output_hidden_states"] = True
        rows = zip(first, keep, strict=True)
        # indices of fed tokens after which some row keeps the logits; at least one for the model
        wanted = {j for start, kept in rows for j in range(start, start + kept)}
        positions = sorted(wanted) or [new - 1]
        if self.slices:  # ``logits_to_keep`` is a number of last positions, or positions
            at_end = positions == list(range(new - len(positions), new))
            chosen = len(positions) if at_end else torch.tensor(positions, device=token_ids.device)
            options["logits_to_keep"] = chosen
        output = self.model(
            input_ids=token_ids, past_key_values=self.shown, use_cache=True, **options
        )
        for layer in self.cache.hidden:
            if not output.hidden_states:
                raise ValueError(f"reads: {type(self.model).__name__} hands out no hidden states")
            self.cache.record(layer, slots.index, output.hidden_states[layer])
        given = positions if self.slices else list(range(new))
        # a row's positions are consecutive in ``given``, too; a row that keeps none begins anywhere
        starts = [given.index(j) if j in given else 0 for j in first]
        return gathered(output.logits, starts, keep)

    def _mask(self, sight: Sight) -> Any:
        """Return one mask or, for several kinds of attention layers, a dict from kind to mask."""
        like = torch.empty(0, dtype=self.dtype, device="cpu")
        masks = {
            kind: additive(sight.within(window), like)[:, None]
            for kind, window in self.masks.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def mask_kinds(model: Any) -> dict[str, int | None]:
    """Return a model's kinds of attention layers, each with its window (None for no window).

    By transformers' convention (``create_masks_for_generate``), ``layer_types`` has a kind for each
    layer; without ``layer_types`` a ``sliding_window`` applies to every layer.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    window = window if isinstance(window, int) else None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {FULL if window is None else SLIDING: window}
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def gathered(
    states: Shaped[Tensor, "batch new *wide"], first: Sequence[int], keep: Sequence[int]
) -> Shaped[Tensor, "batch kept *wide"]:
    """Return ``keep[b]`` entries of row b from ``first[b]`` on; further entries are arbitrary."""
    longest, new = max(keep), states.shape[1]
    if min(first) == max(first) and first[0] + longest <= new:
        return states[:, first[0] : first[0] + longest]
    at = torch.tensor(list(first), device=states.device)[:, None]
    at = (at + torch.arange(longest, device=states.device)).clamp(max=new - 1)
    return states[torch.arange(len(first), device=states.device)[:, None], at]
