"""A causal LM with its own cache: feed tokens, read logits, take tokens back."""

import inspect
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._cache import allocate, rollback


class CachedModel:
    """One Hugging Face causal LM and the positions it has consumed.

    Attributes
    ----------
    length : number of tokens in the cache.
    calls : number of forward passes so far.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        self.model = model
        self.cache = allocate(model, capacity)
        self.length = 0
        self.calls = 0
        self._slices = "logits_to_keep" in inspect.signature(model.forward).parameters

    def feed(self, token_ids: Int[Tensor, "1 new"], keep: int) -> Float[Tensor, "1 keep vocab"]:
        """Consume tokens behind the cached ones; return the logits after the last ``keep``."""
        options = {"logits_to_keep": keep} if self._slices else {}
        output = self.model(
            input_ids=token_ids, past_key_values=self.cache, use_cache=True, **options
        )
        self.length += token_ids.shape[1]
        self.calls += 1
        return output.logits[:, -keep:]

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        rollback(self.cache, length)
        self.length = length
