"""A forward pass of Llama-like models without the library's overhead per module.

Reads the weights of the Hugging Face modules and calls PyTorch directly: the same function of
the same weights up to rounding, for a batch whose rows have different lengths. Models it does
not recognise (other families, quantised or adapted layers, hooks) take the library's own
forward pass instead; see :mod:`cactus_theory.decoding._model`.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cactus_theory.decoding._cache import RaggedCache, text_config
from cactus_theory.decoding._linear import Linear, exact_in_half, joined

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the text
# small layers are bound by calls, not by arithmetic: their projections are joined into one
JOINED_ENTRIES = 2**24


def recognises(model: Any, capacity: int) -> bool:
    """Return whether :class:`LeanModel` computes exactly this model."""
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith(
        "transformers."
    ):
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return False
    if "forward" in vars(model) or not _plain(model.lm_head):
        return False
    if getattr(model.model.rotary_emb, "rope_type", None) not in ROTARY:
        return False
    return _attends_fully(model, capacity) and all(map(_plain_layer, model.model.layers))


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


class _Weights:
    """What the forward pass reads of a model, joined and packed if the model is small."""

    def __init__(self, model: Any) -> None:
        inner, head, small = model.model, model.lm_head, _small(model)
        self.embedding = inner.embed_tokens.weight
        self.norm = _quick_norm(inner.norm) if small and _quick(inner.norm) else _norm(inner.norm)
        self.layers = [_Layer(layer, small) for layer in inner.layers]
        self.head = Linear(head.weight, head.bias) if small else head


def _small(model: Any) -> bool:
    return sum(weight.numel() for weight in model.model.layers.parameters()) <= JOINED_ENTRIES


def _exact(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


# weights of the models in use, for as long as these live and keep them unchanged
_PREPARED: WeakKeyDictionary[Any, tuple[Any, _Weights]] = WeakKeyDictionary()


def _prepared(model: Any) -> _Weights:
    """Return the weights of a model, prepared once as long as nothing changes them."""
    parameters = [weight.detach() for weight in model.parameters()]
    state: list[Any] = [weight.data_ptr() for weight in parameters]
    if _small(model):  # its weights are copied: their sums tell whether the copies are still true
        state.append(
            torch.stack([weight.sum(dtype=_exact(weight)) for weight in parameters]).tolist()
        )
    known = _PREPARED.get(model)
    if known is None or known[0] != state:
        known = _PREPARED[model] = (state, _Weights(model))
    return known[1]


class LeanModel:
    """The forward pass of one recognised model over one cache."""

    def __init__(self, model: Any, cache: RaggedCache) -> None:
        self.cache = cache
        weights = _prepared(model)
        self.embedding, self.norm, self.head = weights.embedding, weights.norm, weights.head
        self.layers = weights.layers
        self.width = model.model.layers[0].self_attn.head_dim
        positions = torch.arange(cache.capacity, device=self.embedding.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position_ids=positions)
        half = self.width // 2
        self.cos = cos[0, :, None]
        self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)

    def __call__(
        self, token_ids: Int[Tensor, "batch new"], ragged: bool
    ) -> Float[Tensor, "batch new hidden"]:
        """Return the normalised hidden states of new tokens behind each row's length.

        Their keys and values are written; the lengths stay as they are. ``ragged`` tells
        that lengths differ between rows.
        """
        batch, new = token_ids.shape
        x = F.embedding(token_ids.reshape(-1), self.embedding)
        start = self.cache.lengths[0]
        end = min(max(self.cache.lengths) + new, self.cache.capacity)
        if ragged:
            starts = torch.tensor(self.cache.lengths, device=x.device)[:, None]
            # what a row does not consume may reach behind the memory: its last place takes it
            at = (starts + torch.arange(new, device=x.device)).clamp(max=self.cache.capacity - 1)
            place: Any = (torch.arange(batch, device=x.device)[:, None], at)
            flat = at.reshape(-1)
            cos, sin = self.cos[flat], self.sin[flat]
            mask = _mask(at, end, x)[:, None]
        else:
            place = (slice(None), slice(start, end))
            cos, sin = self.cos[start:end], self.sin[start:end]
            if batch > 1 and new > 1:
                cos, sin = cos.repeat(batch, 1, 1), sin.repeat(batch, 1, 1)
            mask = None
            if new > 1 and start:
                mask = _mask(torch.arange(start, end, device=x.device), end, x)
        shape = (batch, new)
        for number, layer in enumerate(self.layers):
            x = layer(x, shape, cos, sin, self._memory(number, layer, x), place, end, mask)
        return self.norm(x).view(batch, new, -1)

    def logits(self, hidden: Float[Tensor, "*some hidden"]) -> Float[Tensor, "*some vocab"]:
        """Return the logits of hidden states."""
        return self.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def _memory(self, number: int, layer: "_Layer", x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.take(number, layer.kv_heads, self.width, x)


class _Layer:
    """Weights of one decoder layer, and what happens to the residual stream (N, hidden)."""

    def __init__(self, layer: Any, small: bool) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.width, self.scale = own.head_dim, own.scaling
        self.heads = own.q_proj.out_features // self.width
        self.kv_heads = own.k_proj.out_features // self.width
        projections, gates = [own.q_proj, own.k_proj, own.v_proj], [mlp.gate_proj, mlp.up_proj]
        self.qkv = _normed(layer.input_layernorm, projections, small)
        self.gates = _normed(layer.post_attention_layernorm, gates, small)
        self.q_norm = _norm(own.q_norm) if hasattr(own, "q_norm") else None
        self.k_norm = _norm(own.k_norm) if hasattr(own, "k_norm") else None
        self.out, self.down = own.o_proj, mlp.down_proj
        if small:
            self.out, self.down = (Linear(part.weight, part.bias) for part in (self.out, self.down))
        self.activation = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
        self.inner = mlp.down_proj.in_features

    def __call__(
        self,
        x: Float[Tensor, "N hidden"],
        shape: tuple[int, int],
        cos: Tensor,
        sin: Tensor,
        memory: tuple[Tensor, Tensor],
        place: Any,
        end: int,
        mask: Float[Tensor, "..."] | None,
    ) -> Float[Tensor, "N hidden"]:
        states = self.qkv(x).view(len(x), -1, self.width)
        turned = self.heads + self.kv_heads
        both = states[:, :turned]
        if self.q_norm is not None and self.k_norm is not None:
            q_part, k_part = both[:, : self.heads], both[:, self.heads :]
            both = torch.cat([self.q_norm(q_part), self.k_norm(k_part)], 1)
        both = (both * cos).addcmul_(both.roll(self.width // 2, -1), sin)
        keys, values = memory
        keys[place] = both[:, self.heads :].view(*shape, self.kv_heads, self.width)
        values[place] = states[:, turned:].view(*shape, self.kv_heads, self.width)
        seen = F.scaled_dot_product_attention(
            both[:, : self.heads].view(*shape, self.heads, self.width).transpose(1, 2),
            keys[:, :end].transpose(1, 2),
            values[:, :end].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and shape[1] > 1,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        seen = seen.transpose(1, 2).reshape(len(x), -1)
        x = self.out(seen).add_(x)
        gates = self.gates(x)
        inner = self.activation(gates[:, : self.inner]).mul_(gates[:, self.inner :])
        return self.down(inner).add_(x)


def _mask(at: Int[Tensor, "*batch new"], end: int, like: Tensor) -> Tensor:
    """Return what is added to the scores (..., new, end): −∞ behind each token's position."""
    hidden = torch.arange(end, device=at.device) > at[..., None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=at.device).masked_fill_(
        hidden, -torch.inf
    )


def _norm(module: Any) -> Any:
    weight, epsilon = module.weight, module.variance_epsilon
    shape = weight.shape
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def _normed(norm: Any, parts: list[Any], small: bool) -> Any:
    """Return one call for a norm and the projections of its output, side by side.

    In small models all that is left of the norm is x / √(mean x² + ε): its weight is folded into
    theirs, unless these are exact in half precision and stay so.
    """
    if not small or not _quick(norm):
        before = _norm(norm)

        def apart(x: Tensor) -> Tensor:
            normed = before(x)
            return torch.cat([part(normed) for part in parts], -1)

        return apart
    weight, bias = joined(parts)
    if exact_in_half(weight):
        before, linear = _quick_norm(norm), Linear(weight, bias)
        return lambda x: linear(before(x))
    gain, length = _gain(norm), _length(norm)
    folded = Linear(weight * gain, bias)
    return lambda x: folded(x / length(x))


def _quick(norm: Any) -> bool:
    return norm.weight.dtype in (torch.float32, torch.float64)


def _quick_norm(norm: Any) -> Any:
    """Return the norm as x·√d·w / √(‖x‖² + dε), at half the time of the general one."""
    gain, length = _gain(norm), _length(norm)
    return lambda x: (x * gain).div_(length(x))


def _gain(norm: Any) -> Tensor:
    return norm.weight.detach() * norm.weight.shape[0] ** 0.5


def _length(norm: Any) -> Any:
    """Return x ↦ √(‖x‖² + dε) (..., 1)."""
    least = norm.weight.new_tensor(norm.weight.shape[0] * norm.variance_epsilon).sqrt().detach()
    return lambda x: torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least)
