"""The fast pass: a forward pass of Llama-like models without transformers' overhead per module.

The fast pass reads the weights of the Hugging Face modules, or joined and packed copies, and calls
PyTorch directly. Up to rounding it computes the same function as transformers' forward pass, for a
batch whose rows have different lengths; tests compare the two. Models that the fast pass does not
support (other families, quantised or adapted layers, hooks) run in transformers' forward pass.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cactus_theory.decoding.models.cache import Fed, RaggedCache, Slots, additive, slots_of
from cactus_theory.decoding.models.hugging_face_forward import gathered
from cactus_theory.decoding.models.projections import (
    Linear,
    Ordered,
    exact_in_half,
    joined,
    packs,
    prepared,
)

# most weights of layers whose projections are joined: in small models the calls take the time, not
# the arithmetic
JOINED_ENTRIES = 2**24
# most weights on a CPU that are copied in oneDNN's order, in half and in single precision: 2 GiB
PACKED_ENTRIES, ORDERED_ENTRIES = 2**30, 2**29


class Weights:
    """The weights that the fast pass reads: the model's, or copies that are faster to read."""

    def __init__(self, model: Any) -> None:
        inner, head, copied = model.model, model.lm_head, _copied(model)
        # makes the linear map of a module whose weights are not copied
        read = partial(prepared, make=Ordered) if _ordered(model) else _in_place
        self.embedding = inner.embed_tokens.weight
        self.norm = _quick_norm(inner.norm) if copied and _quick(inner.norm) else _norm(inner.norm)
        self.layers = [
            (PairLayer if hasattr(layer, "hidden_norm") else DecoderLayer)(layer, copied, read)
            for layer in inner.layers
        ]
        self.head = Linear(head.weight, head.bias) if copied else read(head)


def _copied(model: Any) -> bool:
    """Return whether to copy weights: of small models, and of larger ones if oneDNN packs them."""
    entries = sum(weight.numel() for weight in model.model.layers.parameters())
    if packs(model.model.layers[0].self_attn.q_proj.weight):
        return entries + model.lm_head.weight.numel() <= PACKED_ENTRIES
    return entries <= JOINED_ENTRIES


def _ordered(model: Any) -> bool:
    """Return whether to keep a second copy of single-precision CPU weights, in oneDNN's layout."""
    weight, layers = model.lm_head.weight, model.model.layers
    if _copied(model) or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return sum(own.numel() for own in (weight, *layers.parameters())) <= ORDERED_ENTRIES


def _in_place(part: Any) -> Any:
    return part


class DecoderLayer:
    """A decoder layer: its weights, and a call that updates the residual stream (N, hidden).

    N is the number of fed tokens. The projections' weights are copied if ``copied``; else ``read``
    makes each projection from its module.
    """

    def __init__(self, layer: Any, copied: bool, read: Any = _in_place) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width, self.scale = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.shared = self.heads // self.kv_heads  # query heads per key head
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = self.reader(layer, projections, copied, read)
        gates = [mlp.gate_proj, mlp.up_proj]
        self.gates = _normed(layer.post_attention_layernorm, gates, copied, read)
        self.q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.out, self.down = (
            Linear(part.weight, part.bias) if copied else read(part)
            for part in (attention.o_proj, mlp.down_proj)
        )
        self.activation = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
        self.inner = mlp.down_proj.in_features

    def reader(self, layer: Any, projections: list[Any], copied: bool, read: Any) -> Any:
        """Return the function from x to the residual stream and the queries, keys and values."""
        linear = _normed(layer.input_layernorm, projections, copied, read)
        return lambda x: (x, linear(x))

    def __call__(
        self,
        x: Float[Tensor, "N wide"],
        shape: tuple[int, int],
        cos: Tensor,
        sin: Tensor,
        memory: tuple[Tensor, Tensor],
        at: Slots,
        mask: Float[Tensor, "..."] | None,
    ) -> Float[Tensor, "N hidden"]:
        """Return the residual stream after the layer; write keys and values to slots of ``memory``.

        ``mask`` is repeated for each of the ``shared`` query heads of a key head.
        """
        x, states = self.qkv(x)
        states = states.view(len(x), -1, self.width)
        heads = self.heads + self.kv_heads
        rotated = states[:, :heads]
        if self.q_norm is not None and self.k_norm is not None:
            q_part, k_part = rotated[:, : self.heads], rotated[:, self.heads :]
            rotated = torch.cat([self.q_norm(q_part), self.k_norm(k_part)], 1)
        # the rotary embedding; ``sin`` contains the signs (:class:`FastForward`)
        rotated = (rotated * cos).addcmul_(rotated.roll(self.width // 2, -1), sin)
        keys, values = memory
        keys[at.index] = rotated[:, self.heads :].view(*shape, self.kv_heads, self.width)
        values[at.index] = states[:, heads:].view(*shape, self.kv_heads, self.width)
        queries = rotated[:, : self.heads].view(*shape, self.heads, self.width)
        attended = self._attended(queries, keys[:, : at.end], values[:, : at.end], mask)
        attended = attended.transpose(1, 2).reshape(len(x), -1)
        x = self.out(attended).add_(x)
        gates = self.gates(x)
        inner = self.activation(gates[:, : self.inner]).mul_(gates[:, self.inner :])
        return self.down(inner).add_(x)

    def _attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "batch heads new width"]:
        """Attend with ``queries`` (B, new, heads, width) to keys and values (B, end, …).

        With a mask, or for a single new token, the query heads that share a key head are laid out
        as if they were further tokens, so that every kernel reads each key once.
        """
        batch, new, heads, width = queries.shape
        by_head, states = queries.transpose(1, 2), (keys.transpose(1, 2), values.transpose(1, 2))
        heads_as_tokens = mask is not None or new == 1
        if heads_as_tokens:
            by_head = by_head.reshape(batch, self.kv_heads, self.shared * new, width)
        attended = F.scaled_dot_product_attention(
            by_head,
            *states,
            attn_mask=mask,
            is_causal=not heads_as_tokens,
            scale=self.scale,
            enable_gqa=not heads_as_tokens and self.shared > 1,
        )
        return attended.reshape(batch, heads, new, width)


class PairLayer(DecoderLayer):
    """The layer of an EAGLE-3 head, on pairs (N, 2 hidden): a token's embedding, then a stream.

    The stream is made of the target's hidden states (``drafters.eagle3_head``). Each half has a
    separate norm. The residual stream is the stream after its norm if the layer has
    ``norm_before_residual``, else the stream before its norm.
    """

    def reader(self, layer: Any, projections: list[Any], copied: bool, read: Any) -> Any:
        """Return the function from x (N, 2 hidden) to residual stream and queries, keys, values."""
        norms = layer.input_layernorm, layer.hidden_norm
        first, second = (_quick_norm(n) if copied and _quick(n) else _norm(n) for n in norms)
        linear = Linear(*joined(projections)) if copied else _together(projections, read)
        normed_first = layer.norm_before_residual

        def pairs_of(x: Tensor) -> tuple[Tensor, Tensor]:
            embedded, stream = x.chunk(2, -1)
            normed = second(stream)
            pairs = torch.cat([first(embedded), normed], -1)
            return normed if normed_first else stream, linear(pairs)

        return pairs_of


def _norm(module: Any) -> Any:
    weight, epsilon = module.weight, module.variance_epsilon
    shape = weight.shape
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def _normed(norm: Any, parts: list[Any], copied: bool, read: Any) -> Any:
    """Return one function that applies a norm, then several projections, and joins their outputs.

    In copies in single or double precision the norm's weight is folded into the projections, and
    only x / √(mean x² + ε) is left of the norm. Weights that half precision holds exactly are not
    folded, as folded weights would not be exact in half precision.
    """
    if not copied:
        before, together = _norm(norm), _together(parts, read)
        return lambda x: together(before(x))
    weight, bias = joined(parts)
    if not _quick(norm) or exact_in_half(weight):
        before = _quick_norm(norm) if _quick(norm) else _norm(norm)
        linear = Linear(weight, bias)
        return lambda x: linear(before(x))
    gain, length = _gain(norm), _length(norm)
    folded = Linear(weight * gain, bias)
    return lambda x: folded(x / length(x))


def _together(parts: list[Any], read: Any) -> Any:
    """Return one function for several projections of one input, each made by ``read``."""
    calls = [read(part) for part in parts]
    return lambda x: torch.cat([call(x) for call in calls], -1)


def _quick(norm: Any) -> bool:
    return norm.weight.dtype in (torch.float32, torch.float64)


def _quick_norm(norm: Any) -> Any:
    """Return the RMS norm x ↦ x·√d·w / √(‖x‖² + dε), with the weight w, width d and ε of ``norm``.

    The returned function takes half the time of ``F.rms_norm``.
    """
    gain, length = _gain(norm), _length(norm)
    return lambda x: (x * gain).div_(length(x))


def _gain(norm: Any) -> Tensor:
    return norm.weight.detach() * norm.weight.shape[0] ** 0.5


def _length(norm: Any) -> Any:
    """Return the function x ↦ √(‖x‖² + dε), shape (..., 1), with the norm's ε and width d."""
    root = norm.weight.new_tensor(norm.weight.shape[0] * norm.variance_epsilon).sqrt().detach()
    return lambda x: torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), root)


class FastForward:
    """The fast pass of one Llama-like model over one cache."""

    def __init__(self, model: Any, cache: RaggedCache) -> None:
        self.cache = cache
        weights = prepared(model, Weights) if _copied(model) else Weights(model)
        self.embedding, self.norm, self.head = weights.embedding, weights.norm, weights.head
        self.layers = weights.layers
        self.width = model.model.layers[0].self_attn.head_dim
        positions = torch.arange(cache.capacity, device=self.embedding.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding, position_ids=positions)
        half = self.width // 2
        # a layer turns x by x cos + roll(x, half) sin: the first half of sin has the rotation's −1
        self.cos = cos[0, :, None]
        self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)

    def __call__(
        self, token_ids: Fed, counts: Sequence[int], keep: Sequence[int], parents: Fed | None = None
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return the logits after the last ``keep[b]`` of the ``counts[b]`` tokens fed to row b.

        These logits come first in row b of the result; further entries are arbitrary. The tokens'
        keys and values are written; the cache's lengths do not change.
        """
        x = F.embedding(token_ids.reshape(-1), self.embedding)
        states = self.run(x, (token_ids.shape[0], token_ids.shape[1]), counts, parents)
        first = [max(count - kept, 0) for count, kept in zip(counts, keep, strict=True)]
        return self.logits(gathered(states, first, keep))

    def logits(self, hidden: Float[Tensor, "batch some hidden"]) -> Float[Tensor, "batch some V"]:
        """Return the logits of the LM head for states after the final norm."""
        return self.head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def run(
        self,
        x: Float[Tensor, "N wide"],
        shape: tuple[int, int],
        counts: Sequence[int],
        parents: Fed | None = None,
        *,
        normed: bool = True,
    ) -> Float[Tensor, "batch new hidden"]:
        """Return the states after the final norm for a batch (B, new) of embedded tokens.

        With ``normed=False`` return the states before the final norm.
        """
        at = slots_of(self.cache, shape[1], counts, parents, x.device)
        return self.through(x, shape, at, normed)

    def through(
        self, x: Float[Tensor, "N wide"], shape: tuple[int, int], at: Slots, normed: bool = True
    ) -> Float[Tensor, "batch new hidden"]:
        """Return the states of embedded tokens at the slots ``at``, as :meth:`run` does."""
        batch, new = shape
        cos, sin = self._turns(at, batch, new)
        mask, shared = _mask(at, new, x), self.layers[0].shared
        if mask is not None and shared > 1:  # a copy for each query head of a key head
            mask = torch.cat([mask] * shared, -2)
        for number, layer in enumerate(self.layers):
            if number in self.cache.hidden:
                self.cache.record(number, at.index, x.view(batch, new, -1))
            memory = self.cache.take(number, layer.kv_heads, (self.width, self.width), x)
            x = layer(x, shape, cos, sin, memory, at, mask)
        states = (self.norm(x) if normed else x).view(batch, new, -1)
        if len(self.layers) in self.cache.hidden:
            self.cache.record(len(self.layers), at.index, states)
        return states

    def _turns(self, at: Slots, batch: int, new: int) -> tuple[Tensor, Tensor]:
        """Return the rotary cos and sin of the fed tokens, shaped to multiply (N, heads, width)."""
        if at.sight is not None:
            flat = at.sight.positions.reshape(-1)
            return self.cos[flat], self.sin[flat]
        cos, sin = self.cos[at.start : at.end], self.sin[at.start : at.end]
        if batch > 1 and new > 1:
            cos, sin = cos.repeat(batch, 1, 1), sin.repeat(batch, 1, 1)
        return cos, sin


def _mask(at: Slots, new: int, like: Tensor) -> Float[Tensor, "..."] | None:
    """Return the mask to add to attention scores; None if causal attention or no mask suffices."""
    if at.sight is not None:
        return additive(at.sight.hidden, like)[:, None]
    if new == 1 or not at.start:
        return None
    slots = torch.arange(at.end, device=like.device)
    return additive(slots > slots[at.start :, None], like)
