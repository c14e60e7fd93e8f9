r"""Widen and deepen a Llama-like model so that its function stays and its cost grows.

What is new computes with random weights and is multiplied by zero before it reaches the residual
stream, so time, memory and arithmetic are those of the large shape:

* the stream is padded with zeros from d to D; RMSNorm then needs weight × √(d/D), ε × d/D;
* heads of size d_h become heads of size D_h: rotary pair i moves to pair i·D_h/d_h, which turns
  at the same frequency, the other pairs of the queries are 0, and queries grow by √(D_h/d_h) for
  the larger divisor of the scores. So cache and attention have the bytes of the large shape;
* query head r of group j becomes head r of the large group j; heads, MLP units and layers beyond
  those of the model end in zero columns of ``o_proj`` and ``down_proj``;
* one padded channel holds the constant :math:`2^{-32}`. The layers' norms drop it; the final one
  makes 1/rms of it. The vocabulary beyond the model's repeats the model's own, each copy of a
  logit lower by a multiple of that 1/rms, at least FAR: no probability is 0, so that verification
  and meter cost what they cost on dense rows, and copies have :math:`e^{-20}` of the mass of the
  row. Where embedding and output are one matrix, all other logits gain
  :math:`2^{-32}/\mathrm{rms}`.

The function is the same but for these copies and the constant's :math:`2^{-64}` in the norms' sums
of squares. In float32 logits agree to rounding; in bfloat16 as far as those of the model itself in
bfloat16 agree with its own.
"""

import argparse
import math
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.commands.models import Change
from cactus_theory.decoding._prepare import dtype_of
from cactus_theory.decoding.load import AUTO, Pair
from cactus_theory.decoding.models.projections import lay_together


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model."""

    hidden: int  # width of the residual stream
    layers: int
    heads: int
    kv_heads: int
    head: int  # size of one
    inner: int  # units of each gated MLP
    vocab: int
    tied: bool = False  # whether embedding and output projection are one matrix

    @property
    def parameters(self) -> int:
        layer = self.hidden * (2 * self.head * (self.heads + self.kv_heads) + 3 * self.inner + 2)
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return ends + self.layers * layer + self.hidden


# name → shape
SHAPES = {
    "134m": Shape(768, 12, 12, 12, 64, 2048, 32_000),
    "5m": Shape(144, 2, 4, 4, 32, 384, 32_000, tied=True),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 151_936),  # Llama 3 8B
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, tied=True),  # Qwen3 0.6B
    "tiny": Shape(216, 12, 6, 3, 128, 528, 2176),
    "tiny-draft": Shape(160, 2, 8, 4, 64, 384, 2176, tied=True),
}

# target → its draft, of the same vocabulary
DRAFTS = {"134m": "5m", "8b": "0.6b", "tiny": "tiny-draft"}

# value of the constant channel; its square is lost in any sum of squares of the stream
CONSTANT = 2.0**-32
# least logit by which a copy lies below its token; at more, rows of the shipped pair, whose entries
# go down to e^-32 and whose rms varies threefold, would leave the normal numbers of float32
FAR = 20.0
# tokens of each text on which the stream's rms is measured
LOOKED_AT = 32
# standard deviation of random weights, as models are initialised: nothing overflows
SPREAD = 0.02
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
MEMINFO = Path("/proc/meminfo")


def inflate_pair(
    pair: Pair,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Pair:
    """Return a pair of Llama models in the shapes that ``DRAFTS`` names, the target's by name.

    ValueError for an unknown name, a draft that is no model, less free memory than the weights
    take, and as :func:`inflate`.
    """
    shapes = [SHAPES[part] for part in (check.one_of("inflate", name, tuple(DRAFTS)), DRAFTS[name])]
    needed = sum(shape.parameters for shape in shapes) * dtype.itemsize
    free = free_memory(torch.device(device))
    if needed > free:
        raise ValueError(
            f"inflate: the weights of {name} and its draft take {needed / 1e6:,.0f} MB in "
            f"{str(dtype).removeprefix('torch.')}; {free / 1e6:,.0f} MB are free"
        )
    models = zip((pair.target, pair.draft), shapes, strict=True)
    large = [inflate(*model, device=device, dtype=dtype) for model in models]
    return replace(pair, target=large[0], draft=large[1])


def free_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMINFO.is_file():
        return math.inf
    lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def inflate(
    model: Any,
    shape: Shape,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Return a ``LlamaForCausalLM`` of this shape that computes the function of ``model``.

    It is built on ``device``, one tensor after another, and takes no other memory there.
    ValueError for a model with biases, of another kind or rotary embedding, a shape that is not as
    large as the model in everything, with more hidden channels, heads that do not divide, a dtype
    whose range is too small for the constant (float16).
    """
    _check(model, shape, dtype)
    if model.dtype.itemsize < 4:  # what is scaled is rounded once, at the end
        model = deepcopy(model).float()
    large = _empty(model, shape, device, dtype)
    noise = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        _fill_ends(large, model)
        small_layers = list(model.model.layers)
        for number, layer in enumerate(large.model.layers):
            _fill_noise(layer, noise)
            if number < len(small_layers):
                _fill_layer(layer, small_layers[number])
    return large.eval().requires_grad_(False)


def _check(model: Any, shape: Shape, dtype: torch.dtype) -> None:
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if name != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"model: must be a LlamaForCausalLM without biases; got {name}")
    if model.model.rotary_emb.rope_type != "default":
        kind = model.model.rotary_emb.rope_type
        raise ValueError(f"model: rotary embedding must be the default one; got {kind!r}")
    if shape.tied and not config.tie_word_embeddings:
        raise ValueError("shape: must not be tied, as the model is not; got tied=True")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be bfloat16, float32 or float64; got {dtype}")
    groups = shape.heads // shape.kv_heads, config.num_attention_heads // config.num_key_value_heads
    sizes = {
        "hidden": (shape.hidden, config.hidden_size + 1),  # one for the constant
        "layers": (shape.layers, config.num_hidden_layers),
        "kv_heads": (shape.kv_heads, config.num_key_value_heads),
        "heads / kv_heads": groups,
        "head": (shape.head, config.head_dim),
        "inner": (shape.inner, config.intermediate_size),
        "vocab": (shape.vocab, config.vocab_size),
    }
    for field, (large, least) in sizes.items():
        if large < least:
            raise ValueError(f"shape: {field} must be at least {least} for this model; got {large}")
    if shape.head % config.head_dim:
        raise ValueError(f"shape: head must be a multiple of {config.head_dim}; got {shape.head}")


def _empty(model: Any, shape: Shape, device: Any, dtype: torch.dtype) -> Any:
    import transformers

    small = model.config
    kept = ("max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id",
            "pad_token_id")  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / shape.hidden,
        tie_word_embeddings=shape.tied,
        **{name: deepcopy(getattr(small, name)) for name in kept},
    )
    with torch.device("meta"):
        large: Any = transformers.LlamaForCausalLM(config)
    large.to(dtype).to_empty(device=device)
    for layer in large.model.layers:  # fewer, larger kernels in the fast pass
        attention, mlp = layer.self_attn, layer.mlp
        lay_together([attention.q_proj, attention.k_proj, attention.v_proj])
        lay_together([mlp.gate_proj, mlp.up_proj])
    large.tie_weights()
    # its frequencies are no weights: they are computed, in float32, when it is made
    large.model.rotary_emb = type(large.model.rotary_emb)(config=config).to(device)
    return large


def _fill_ends(large: Any, model: Any) -> None:
    vocab, hidden = model.model.embed_tokens.weight.shape
    embedding, head = large.model.embed_tokens.weight, large.lm_head.weight
    for big, small in ((head, model.lm_head.weight), (embedding, model.model.embed_tokens.weight)):
        big.zero_()[:vocab, :hidden] = small
    for copies in head[vocab:].split(vocab):
        copies[:, :hidden] = model.lm_head.weight[: len(copies)]
    embedding[:vocab, hidden] = CONSTANT
    head[vocab:, hidden] = -FAR * _largest_rms(model) * (hidden / head.shape[1]) ** 0.5
    _fill_norm(large.model.norm, model.model.norm)
    large.model.norm.weight[hidden] = 1 / CONSTANT


def _largest_rms(model: Any) -> float:
    """Return the largest root mean square that the final norm divides by, over all tokens."""
    streams: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    length = min(LOOKED_AT, model.config.vocab_size)
    ids = torch.arange(model.config.vocab_size, device=model.device)
    model.model(ids[: len(ids) // length * length].view(-1, length), use_cache=False)
    hook.remove()
    return float(streams[0].double().square().mean(-1).max().sqrt())


def _fill_noise(layer: Any, noise: torch.Generator) -> None:
    """Fill a layer with random weights whose output does not reach the stream."""
    for weight in layer.parameters():
        if weight.ndim == 2:
            weight.normal_(0.0, SPREAD, generator=noise)
        else:
            weight.fill_(1.0)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def _fill_layer(layer: Any, small: Any) -> None:
    _fill_norm(layer.input_layernorm, small.input_layernorm)
    _fill_norm(layer.post_attention_layernorm, small.post_attention_layernorm)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _corner(getattr(layer.mlp, name).weight, getattr(small.mlp, name).weight)
    _fill_attention(layer.self_attn, small.self_attn)


def _fill_norm(norm: Any, small: Any) -> None:
    """Write a norm's weights; the constant's channel gets 0, the padded ones any number."""
    hidden, large = len(small.weight), len(norm.weight)
    norm.weight.fill_(1.0)
    norm.weight[:hidden] = small.weight.double() * (hidden / large) ** 0.5
    norm.weight[hidden] = 0.0


def _corner(weight: Tensor, small: Tensor) -> None:
    weight[: len(small), : small.shape[1]] = small


def _fill_attention(attention: Any, small: Any) -> None:
    head, size = attention.head_dim, small.head_dim
    pairs = torch.arange(size // 2, device="cpu") * (head // size)
    turned = torch.cat([pairs, head // 2 + pairs])
    groups = small.num_key_value_groups
    for number in range(small.q_proj.out_features // size):
        group, member = divmod(number, groups)
        large = group * attention.num_key_value_groups + member
        queries = _rows_of_head(small.q_proj.weight, number, size).double() * (head / size) ** 0.5
        block = _rows_of_head(attention.q_proj.weight, large, head).zero_()
        block[turned, : queries.shape[1]] = queries.to(block)
        block = _rows_of_head(attention.o_proj.weight.t(), large, head)
        _corner(block, _rows_of_head(small.o_proj.weight.t(), number, size))
    for number in range(small.k_proj.out_features // size):
        keys = _rows_of_head(small.k_proj.weight, number, size)
        block = _rows_of_head(attention.k_proj.weight, number, head)
        block[turned, : keys.shape[1]] = keys.to(block)
        block = _rows_of_head(attention.v_proj.weight, number, head)
        _corner(block, _rows_of_head(small.v_proj.weight, number, size))


def _rows_of_head(weight: Tensor, number: int, size: int) -> Tensor:
    return weight[number * size : (number + 1) * size]


def add_inflate(parser: argparse.ArgumentParser) -> None:
    words = f"a target of so many parameters and its draft ({', '.join(DRAFTS)})"
    parser.add_argument(
        "--inflate", choices=tuple(DRAFTS), metavar="SHAPE",
        help=f"give both models the cost of larger ones, which keeps their law: {words}",
    )  # fmt: skip


def enlarging(args: argparse.Namespace) -> Change | None:
    """Return a change of the pair to the shapes of ``--inflate``, for ``loaded``, or None.

    It notes in ``args.cost`` what that means. Raises ValueError as :func:`inflate_pair`.
    """
    if args.inflate is None:
        return None

    def enlarged(pair: Pair) -> Pair:
        dtype = pair.target.dtype if args.dtype == AUTO else getattr(torch, args.dtype)
        pair = inflate_pair(pair, args.inflate, dtype=dtype, device=args.device)
        sizes = (SHAPES[name].parameters / 1e6 for name in (args.inflate, DRAFTS[args.inflate]))
        args.cost = (
            "the law of the pair at the cost of {:,.0f} M and {:,.0f} M parameters, ".format(*sizes)
            + f"V = {pair.target.config.vocab_size:,}, {dtype_of([pair.target])}, "
            "rows without zeros"
        )
        return pair

    return enlarged
