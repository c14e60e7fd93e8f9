"""A causal LM with a cache: feed tokens, get logits, roll tokens back.

The module also finds the length of a text up to which cached passes equal passes without a cache.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.rows import warn_of_probabilities
from cactus_theory.decoding.models.cache import Fed, allocate, text_config
from cactus_theory.decoding.models.cache_check import runs_together
from cactus_theory.decoding.models.hugging_face_forward import LibraryForward, gathered
from cactus_theory.decoding.models.llama_forward import FastForward
from cactus_theory.decoding.models.recognised import obstacle


class CachedModel:
    """A Hugging Face causal LM with a cached length per row: :meth:`feed` tokens and get logits.

    A recognised Llama-like model runs in :class:`FastForward`. Any other model runs in
    transformers' forward pass, whose logits over a cache must equal those without (checked once per
    model). Both passes take the whole batch in one call, but a model family that does not accept
    our attention mask takes one text only. ``lengths`` are the numbers of cached tokens of rows,
    which :meth:`feed` and the cache's methods ``rollback``, ``select`` and ``keep`` change.

    Parameters
    ----------
    capacity : positions of each row, including fed tokens that are rolled back later.
    slack : further slots of each row that no text fills: a reserve, or for tree nodes beside a
        path.
    fast_forward : None uses the fast pass where it supports the model, True requires the fast pass,
        False uses transformers' pass.
    reads : layers whose hidden states are kept beside the cache, for :meth:`hidden`.
    drafts : whether the model only drafts; its cached passes may then differ from passes without a
        cache, as verification works with the rows p that tokens were really drawn from.

    Raises
    ------
    ValueError
        ``fast_forward=True`` for a model that the fast pass does not support, layers that cannot
        be rolled back, cached passes that differ from uncached ones or will within ``capacity``, a
        batch for a model family that takes one text, layers to read that do not exist.
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        batch: int = 1,
        *,
        slack: int = 0,
        fast_forward: bool | None = None,
        reads: Sequence[int] = (),
        drafts: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache = allocate(model, batch, capacity + slack)
        self.lengths: Sequence[int] = cache.lengths
        self.rollback, self.select, self.keep = cache.rollback, cache.select, cache.keep
        layers = len(cache.keys)
        for layer in reads:
            if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer <= layers:
                raise ValueError(f"reads: must be layers in [0, {layers}]; got {layer!r}")
        self.cache.hidden = dict.fromkeys(reads)
        self.calls = 0
        self.fast = fast_forward is not False
        if self.fast and (reason := obstacle(model, capacity + slack)) is not None:
            if fast_forward:
                raise ValueError(f"fast_forward: must be None or False here, {reason}; got True")
            self.fast = False
        if self.fast:
            self.forward: FastForward | LibraryForward = FastForward(model, self.cache)
            self.branches = True  # whether trees and ragged batches run
        else:
            check_positions(model, capacity)
            self.branches = runs_together(model, lossless=drafts)
            if batch > 1 and not self.branches:
                raise ValueError(
                    f"model: {type(model).__name__} takes no attention mask (B, 1, new, end) of "
                    f"ours, and so decodes one text at a time; got {batch}"
                )
            self.forward = LibraryForward(model, self.cache)

    def hidden(
        self, layer: int, starts: Sequence[int], counts: Sequence[int]
    ) -> Float[Tensor, "batch most hidden"]:
        """Return copies of the hidden states of ``counts[b]`` cached tokens from ``starts[b]`` on.

        Entries of row b after ``counts[b]`` are arbitrary. Raises ValueError for a layer that is
        not in ``reads`` and for tokens that are not cached.
        """
        if layer not in self.cache.hidden:
            raise ValueError(
                f"layer: must be one of those to read {list(self.cache.hidden)}; got {layer!r}"
            )
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if not (count >= 0 and 0 <= start and start + count <= self.lengths[row]):
                raise ValueError(
                    f"counts: row {row} has states of {self.lengths[row]} tokens; "
                    f"got {count} from {start} on"
                )
        memory = self.cache.hidden[layer]
        if memory is None:  # nothing was fed yet
            return torch.empty(len(counts), 0, 0, device="cpu")
        states = gathered(memory, starts, counts)
        # with equal starts ``gathered`` may return a view of the cache
        return states.clone() if min(starts) == max(starts) else states

    def feed(
        self, token_ids: Fed, counts: Sequence[int], keep: Sequence[int], parents: Fed | None = None
    ) -> Float[Tensor, "batch kept vocab"]:
        """Feed ``counts[b]`` tokens after the cached tokens of row b; return logits.

        ``parents`` makes trees: the index of each token's parent among the row's fed tokens, −1 for
        the last cached token. None is a chain. A token has the position after its parent's, and
        attends to the cached tokens, its ancestors and itself. ``select`` then keeps one path.

        The logits are those after the last ``keep[b]`` fed tokens of row b, at the start of row b.
        Further entries, and all entries of a row without fed tokens, are arbitrary. The caller may
        write to the logits.

        Raises ValueError for more tokens than the cache has room for, for parents that do not come
        before their children, and for ``parents`` with a model that takes no mask of ours.
        """
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if count < 0 or length + count > self.cache.capacity:
                raise ValueError(
                    f"counts: row {row} must feed 0 to {self.cache.capacity - length} tokens, "
                    f"as many as its cache has room for; got {count}"
                )
        new = max(counts)
        if parents is not None:
            self._check_parents(parents)
            parents = parents[:, :new]
        self.calls += 1
        logits = self.forward(token_ids[:, :new], counts, keep, parents)
        if self.calls == 1:
            warn_of_probabilities(type(self.model).__name__, logits[0, 0])
        self.cache.extend(counts)
        return logits

    def _check_parents(self, parents: Tensor) -> None:
        """Raise ValueError if the model takes no trees or parents stand behind their children."""
        if not self.branches:
            raise ValueError(
                f"parents: must be None for {type(self.model).__name__}, which takes no "
                "attention mask (B, 1, new, end) of ours and so no trees; got a tensor"
            )
        if parents.device.type != "cpu":
            return  # looking at values would wait for the device
        before = torch.arange(parents.shape[1], device="cpu")
        if bool(((parents < -1) | (parents >= before)).any()):
            raise ValueError(
                f"parents: each must be −1 or the index of an earlier token; got {parents.tolist()}"
            )


def longest_text(model: Any) -> int | None:
    """Return the most positions of a text that a model supports with a cache, None for no limit."""
    limits = [length for length, _ in _limits(model)]
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:  # −1 stands for no limit
        limits.append(positions)
    return min(limits, default=None)


def check_positions(model: Any, capacity: int) -> None:
    """Raise ValueError if cached passes may go wrong within ``capacity`` positions.

    There are two reasons. A rotary table may change once a text outgrows the model's original
    length, while cached keys keep the old table. A sliding window may be applied by transformers'
    caches, but not by the model's forward pass.
    """
    for length, words in _limits(model):
        if capacity > length:
            raise ValueError(
                f"model: prompt and new tokens of {type(model).__name__} must stay within "
                f"{words.format(length)}; got {capacity}"
            )


def _limits(model: Any) -> Iterator[tuple[int, str]]:
    """Yield lengths beyond which cached passes go wrong, each with words for the error."""
    config, module = text_config(model), type(model).__module__
    parameters = getattr(config, "rope_parameters", None) or {}
    # one table, or one table per kind of layer
    for table in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if table.get("rope_type") == "longrope":
            length = table.get("original_max_position_embeddings") or config.max_position_embeddings
            yield length, "{} positions, where its rotary table changes under cached keys"
    window = getattr(config, "sliding_window", None)
    # a model of transformers that never makes the window's mask ignores the window; other models
    # may apply it in their own way
    if isinstance(window, int) and module.startswith("transformers."):
        if not hasattr(sys.modules[module], "create_sliding_window_causal_mask"):
            yield window, "its sliding window of {}, which its forward pass does not apply"
