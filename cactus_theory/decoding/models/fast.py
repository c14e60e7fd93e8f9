"""A forward pass of Llama-like models without the library's overhead per module.

Reads the weights of the Hugging Face modules and calls PyTorch directly: the same function of
the same weights up to rounding, for a batch whose rows have different lengths. The library's
own forward pass is its test; ``fast_forward=False`` takes that one instead, and models this
pass does not support (other families, quantised or adapted layers, hooks) always do; see
:mod:`cactus_theory.decoding.models.cached`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.decoding.models.cache import Places, RaggedCache, additive, places, text_config
from cactus_theory.decoding.models.library import gathered
from cactus_theory.decoding.models.weights import DecoderLayer, prepared

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# its hooks stay on a model that was once asked for hidden states, and do nothing in other passes
CAPTURING = "transformers.utils.output_capturing"
ROTARY = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the text


def obstacle(model: Any, capacity: int) -> str | None:
    """Return why :class:`FastForward` cannot compute exactly this model, None if it can."""
    name = type(model).__name__
    if name not in FAMILIES or not type(model).__module__.startswith("transformers."):
        return f"the fast pass supports {', '.join(FAMILIES)} and not {name}"
    if _hooked(model):
        return "the model has hooks"
    if "forward" in vars(model):
        return "the model's forward was replaced"
    if getattr(model.model.rotary_emb, "rope_type", None) not in ROTARY:
        return "its rotary table depends on the text"
    if not _attends_fully(model, capacity):
        return "its sliding window is shorter than the text"
    if not (_plain(model.lm_head) and all(map(_plain_layer, model.model.layers))):
        return "its layers are quantised or adapted"
    return None


def _hooked(model: Any) -> bool:
    tables = [own for m in model.modules() for own in (m._forward_hooks, m._forward_pre_hooks)]
    hooks = [hook for own in tables if own for hook in own.values()]
    return any(getattr(hook, "__module__", None) != CAPTURING for hook in hooks)


def _attends_fully(model: Any, capacity: int) -> bool:
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return window is None or window >= capacity or "sliding_attention" not in kinds


def _plain(module: Any) -> bool:
    return type(module) is nn.Linear


def _plain_layer(layer: Any) -> bool:
    own, mlp = layer.self_attn, layer.mlp
    return all(
        _plain(module)
        for module in (own.q_proj, own.k_proj, own.v_proj, own.o_proj)
        + (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )


class FastForward:
    """The forward pass of one recognised model over one cache."""

    def __init__(self, model: Any, cache: RaggedCache) -> None:
        self.cache = cache
        weights = prepared(model)
        self.embedding, self.norm, self.head = weights.embedding, weights.norm, weights.head
        self.layers = weights.layers
        self.width = model.model.layers[0].self_attn.head_dim
        positions = torch.arange(cache.capacity, device=self.embedding.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position_ids=positions)
        half = self.width // 2
        self.cos = cos[0, :, None]
        self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)

    def __call__(
        self,
        token_ids: Int[Tensor, "batch new"],
        counts: Sequence[int],
        keep: Sequence[int],
        parents: Int[Tensor, "batch new"] | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return the logits after the last ``keep[b]`` of ``counts[b]`` tokens, first in a row.

        Their keys and values are written; the lengths stay as they are.
        """
        x = F.embedding(token_ids.reshape(-1), self.embedding)
        states = self.run(x, (token_ids.shape[0], token_ids.shape[1]), counts, parents)
        first = [max(count - kept, 0) for count, kept in zip(counts, keep, strict=True)]
        hidden = gathered(states, first, keep)
        return self.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def run(
        self,
        x: Float[Tensor, "N hidden"],
        shape: tuple[int, int],
        counts: Sequence[int],
        parents: Int[Tensor, "batch new"] | None = None,
    ) -> Float[Tensor, "batch new hidden"]:
        """Return the states that the head reads of a batch (B, new) of embedded tokens."""
        batch, new = shape
        at = places(self.cache, new, counts, parents, x.device)
        cos, sin = self._turns(at, batch, new)
        mask = self.stacked(_mask(at, new, x))
        for number, layer in enumerate(self.layers):
            if number in self.cache.hidden:
                self.cache.record(number, at.place, x.view(batch, new, -1))
            x = layer(x, shape, cos, sin, self.memory(number, layer, x), at, mask)
        states = self.norm(x).view(batch, new, -1)
        if len(self.layers) in self.cache.hidden:
            self.cache.record(len(self.layers), at.place, states)
        return states

    def _turns(self, at: Places, batch: int, new: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the fed tokens' positions (N, 1, width)."""
        if at.sight is not None:
            flat = at.sight.positions.reshape(-1)
            return self.cos[flat], self.sin[flat]
        cos, sin = self.cos[at.start : at.end], self.sin[at.start : at.end]
        if batch > 1 and new > 1:
            cos, sin = cos.repeat(batch, 1, 1), sin.repeat(batch, 1, 1)
        return cos, sin

    def stacked(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask (…, new, end) with a copy for each query head of a head of keys."""
        shared = self.layers[0].shared
        return mask if mask is None or shared == 1 else torch.cat([mask] * shared, -2)

    def memory(self, number: int, layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache of a layer's keys and values."""
        return self.cache.take(number, layer.kv_heads, (self.width, self.width), x)


def _mask(at: Places, new: int, like: Tensor) -> Float[Tensor, "..."] | None:
    """Return what is added to the scores, None where all is seen or plain causality does."""
    if at.sight is not None:
        return additive(at.sight.hidden, like)[:, None]
    if new == 1 or not at.start:
        return None
    slots = torch.arange(at.end, device=like.device)
    return additive(slots > slots[at.start :, None], like)
