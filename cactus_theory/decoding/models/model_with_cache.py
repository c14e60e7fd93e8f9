"""A causal LM with its own cache: feed tokens, read logits, roll tokens back.

And up to which length of a text its passes equal those without a cache.
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
    """A Hugging Face causal LM and the number of positions each row has consumed.

    A recognised Llama-like model runs in :class:`FastForward`; any other in the library's own
    forward pass, which must give the same logits over a cache as without (tried once per
    model). Either takes the whole batch in one call; a family that does not accept our attention
    mask takes one text.

    Parameters
    ----------
    capacity, slack : positions of each row, fed tokens that are not kept included, and more.
        ``lengths`` are the cached tokens of each row, which :meth:`feed` and the cache's own
        ``rollback``, ``select`` and ``keep`` change.
    fast_forward : None takes the fast pass where it supports the model, True requires it,
        False takes the library's pass.
    reads : layers whose hidden states are kept beside the cache, for :meth:`hidden`.
    drafts : whether the model only drafts, so that its passes need no check: any draft is lossless.

    Raises
    ------
    ValueError
        ``fast_forward=True`` for a model that the fast pass does not support, layers that cannot
        be rolled back, cached passes that differ from whole ones or will within ``capacity``,
        a batch of a family that takes one text, layers to read that there are not.
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
            self.branches = True
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

        The entries of shorter rows after theirs are arbitrary. Raises ValueError for a layer that
        is not in ``reads``, tokens that are not cached.
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
        return states.clone() if min(starts) == max(starts) else states

    def feed(
        self, token_ids: Fed, counts: Sequence[int], keep: Sequence[int], parents: Fed | None = None
    ) -> Float[Tensor, "batch kept vocab"]:
        """Consume ``counts[b]`` tokens after the cached ones of row b.

        ``parents`` makes trees of them: the index of each token's parent among its row's fed
        tokens, −1 for the last cached token; None is a chain. A token stands one position
        after its parent and sees the cached tokens, its ancestors and itself;
        :meth:`select` then keeps one path.

        Returns the logits after the last ``keep[b]`` of them, first in their row; the entries
        after those, and all entries of a row that consumes nothing, are arbitrary. Their memory
        is the caller's to write to.

        Raises ValueError for more tokens than the cache holds, for parents that do not come before
        their children, and for any of a family that takes no mask of ours.
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
    """Return the most positions of a text that a model runs over alike, None for no limit."""
    limits = [length for length, _ in _limits(model)]
    own = getattr(text_config(model), "max_position_embeddings", None)
    if isinstance(own, int) and own > 0:  # −1 stands for no limit
        limits.append(own)
    return min(limits, default=None)


def check_positions(model: Any, capacity: int) -> None:
    """Raise if the library's own parts treat a text of ``capacity`` positions differently.

    By a rotary table that changes once a text outgrows its original length, while the cached keys
    keep the old one; by a sliding window that the library's caches apply and the model's forward
    pass does not.
    """
    for length, words in _limits(model):
        if capacity > length:
            raise ValueError(
                f"model: prompt and new tokens of {type(model).__name__} must stay within "
                f"{words.format(length)}; got {capacity}"
            )


def _limits(model: Any) -> Iterator[tuple[int, str]]:
    config, module = text_config(model), type(model).__module__
    parameters = getattr(config, "rope_parameters", None) or {}
    for table in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if table.get("rope_type") == "longrope":
            length = table.get("original_max_position_embeddings") or config.max_position_embeddings
            yield length, "{} positions, where its rotary table changes under cached keys"
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and module.startswith("transformers."):  # others may apply it
        if not hasattr(sys.modules[module], "create_sliding_window_causal_mask"):
            yield window, "its sliding window of {}, which its forward pass does not apply"
