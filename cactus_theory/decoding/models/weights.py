"""The weights that the fast pass reads, joined and packed where the model is small.

They are joined anew when any of the model's own changes, which a fingerprint of each tensor tells.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cactus_theory.decoding.models.cache import Places
from cactus_theory.decoding.models.linear import Linear, adjacent, exact_in_half, joined

# small layers are bound by calls, not by arithmetic: their projections are joined into one
JOINED_ENTRIES = 2**24


class Weights:
    """The weights that the fast pass reads, joined and packed if the model is small."""

    def __init__(self, model: Any) -> None:
        inner, head, small = model.model, model.lm_head, _small(model)
        self.embedding = inner.embed_tokens.weight
        self.norm = _quick_norm(inner.norm) if small and _quick(inner.norm) else _norm(inner.norm)
        self.layers = [DecoderLayer(layer, small) for layer in inner.layers]
        self.head = Linear(head.weight, head.bias) if small else head


def _small(model: Any) -> bool:
    return sum(weight.numel() for weight in model.model.layers.parameters()) <= JOINED_ENTRIES


# weights of the models in use, for as long as these live and keep them unchanged
_PREPARED: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def prepared(model: Any) -> Weights:
    """Return the weights of a model, prepared once as long as nothing changes them.

    A large model's are read in place. A small model's are copied, so their content is
    compared at every call.
    """
    return unchanged(model, Weights, _small(model))


def unchanged(
    module: Any, make: Callable[..., Any], compared: bool = True, others: Sequence[Tensor] = ()
) -> Any:
    """Return what ``make`` makes of a module, made once as long as its weights stay as they are.

    ``compared`` compares their content too: version counters would miss
    ``weight.data.copy_(…)``, and weights made in inference mode have none. So it is for ``others``,
    which ``make`` is given, too.
    """
    parameters = [weight.detach() for weight in (*module.parameters(), *others)]
    state: list[Any] = [(weight.data_ptr(), weight.shape, weight.dtype) for weight in parameters]
    if compared:
        state.append(fingerprint(parameters))
    known = _PREPARED.get(module)
    if known is None or known[0] != state:
        known = _PREPARED[module] = (state, make(module, *others))
    return known[1]


class DecoderLayer:
    """Weights of one decoder layer, and what happens to the residual stream (N, hidden)."""

    def __init__(self, layer: Any, small: bool) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.width, self.scale = own.head_dim, own.scaling
        self.heads = own.q_proj.out_features // self.width
        self.kv_heads = own.k_proj.out_features // self.width
        self.shared = self.heads // self.kv_heads
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
        at: Places,
        mask: Float[Tensor, "..."] | None,
    ) -> Float[Tensor, "N hidden"]:
        """Return the stream after the layer; keys and values of its N tokens are written.

        ``mask`` is once there for each of the ``shared`` query heads of a head of keys.
        """
        states = self.qkv(x).view(len(x), -1, self.width)
        turned = self.heads + self.kv_heads
        both = states[:, :turned]
        if self.q_norm is not None and self.k_norm is not None:
            q_part, k_part = both[:, : self.heads], both[:, self.heads :]
            both = torch.cat([self.q_norm(q_part), self.k_norm(k_part)], 1)
        both = (both * cos).addcmul_(both.roll(self.width // 2, -1), sin)
        keys, values = memory
        keys[at.place] = both[:, self.heads :].view(*shape, self.kv_heads, self.width)
        values[at.place] = states[:, turned:].view(*shape, self.kv_heads, self.width)
        queries = both[:, : self.heads].view(*shape, self.heads, self.width)
        seen = self._attended(queries, keys[:, : at.end], values[:, : at.end], mask)
        seen = seen.transpose(1, 2).reshape(len(x), -1)
        x = self.out(seen).add_(x)
        gates = self.gates(x)
        inner = self.activation(gates[:, : self.inner]).mul_(gates[:, self.inner :])
        return self.down(inner).add_(x)

    def _attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "batch heads new width"]:
        """Attend with ``queries`` (B, new, heads, width) to keys and values (B, end, …).

        Under a mask the queries that share a head of keys stand behind one another, as if they
        were more tokens: each key is read once, by any kernel that takes a mask.
        """
        batch, new, heads, width = queries.shape
        turned, states = queries.transpose(1, 2), (keys.transpose(1, 2), values.transpose(1, 2))
        if mask is not None:
            turned = turned.reshape(batch, self.kv_heads, self.shared * new, width)
        seen = F.scaled_dot_product_attention(
            turned,
            *states,
            attn_mask=mask,
            is_causal=mask is None and new > 1,
            scale=self.scale,
            enable_gqa=mask is None and self.shared > 1,
        )
        return seen.reshape(batch, heads, new, width)


def _norm(module: Any) -> Any:
    weight, epsilon = module.weight, module.variance_epsilon
    shape = weight.shape
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def _normed(norm: Any, parts: list[Any], small: bool) -> Any:
    """Return one call for a norm and the projections of its output, side by side.

    Projections whose weights lie together in memory (``lay_together``) are one. In small models
    all that is left of the norm is x / √(mean x² + ε): its weight is folded into theirs, unless
    these are exact in half precision and stay so.
    """
    if not small or not _quick(norm):
        before, whole = _norm(norm), adjacent(parts)
        if whole is not None:
            return lambda x: F.linear(before(x), whole)

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


WIDE = 4096  # 8-byte words a block: their multipliers stay in the processor's first cache


def fingerprint(weights: Sequence[Tensor]) -> list[int]:
    """Return Σⱼ bⱼ wᵢⱼ mod 2⁶⁴ for every block i of the tensors' bytes, WIDE 8-byte words each.

    The multipliers are random and odd, hence invertible: a single changed word is always seen,
    and other changes are missed for one in about 2⁶² choices of multipliers. The order of the
    values counts. The 21 MB of a model of 5 million weights take 2.7 ms; their sums take 0.9 ms.
    """
    return torch.cat([part for weight in weights for part in _blocks(weight)]).tolist()


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    words = _words(weight)
    multipliers, rest = _multipliers(words.device), words.shape[0] % WIDE
    whole = words.shape[0] - rest
    if whole:
        yield _times(words[:whole].view(-1, WIDE), multipliers)
    if rest:
        yield _times(words[None, whole:], multipliers[:rest])


def _words(weight: Tensor) -> Tensor:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8)
    if raw.shape[0] % 8:
        raw = F.pad(raw, (0, -raw.shape[0] % 8))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _times(rows: Tensor, multipliers: Tensor) -> Tensor:
    """Return the products of integer rows with a vector; only the CPU has them as one call."""
    return rows @ multipliers if rows.device.type == "cpu" else (rows * multipliers).sum(-1)


@lru_cache(maxsize=4)
def _multipliers(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        drawn = torch.randint(-(2**62), 2**62, (WIDE,), generator=torch.Generator().manual_seed(0))
        return (2 * drawn + 1).to(device)
