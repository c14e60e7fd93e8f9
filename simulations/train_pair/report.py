"""Measure a stored pair: held-out loss, overlap on the target's samples, cost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from transformers import LlamaForCausalLM

from .distil import prefixes, sample
from .tokenizer import Stream

# draft passes timed with one target pass, about as in a decode
DRAFTS_PER_ROUND = 5


@dataclass(frozen=True)
class HeldOut:
    """Loss on unseen files; ``bits_per_byte`` counts end-of-text tokens but not their bytes."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True)
class Overlap:
    """Mean over positions of the sum over tokens of min(q, p)."""

    mean: float
    positions: int
    sequences: int
    prefix_tokens: int


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of one forward of one token with a cache, and their ratio."""

    target_ms: float
    draft_ms: float
    ratio: float


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, stream: Stream, size: int, context: int = 256
) -> HeldOut:
    """Score every token of the stream once, with between 256 and 511 tokens before it.

    Windows of 512 move by 256 and score their second half; the first one scores all.
    ``size`` is the length of the documents in bytes.
    """
    tokens = stream.tokens.long()
    total, count = 0.0, 0
    for end in range(context, len(tokens) - 1 + context, context):
        window = tokens[max(0, end - 2 * context) : end + 1]
        new = len(window) - 1 if end <= context else min(context, len(tokens) - 1 - end + context)
        logits = model(window[None, :-1], use_cache=False).logits[0, -new:]
        total += F.cross_entropy(logits, window[-new:], reduction="sum").item()
        count += new
    return HeldOut(total / count, total / math.log(2) / size, count)


@torch.inference_mode()
def overlap(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    stream: Stream,
    *,
    rows: int,
    length: int,
    seed: int,
    prefix_tokens: int = 32,
) -> Overlap:
    """Average the overlap of q and p over the target's continuations of held-out prefixes."""
    generator = Generator().manual_seed(seed)
    values: list[Tensor] = []
    for _ in range(0, rows, 32):
        prefix = prefixes(stream, 32, prefix_tokens, generator)
        context = sample(target, prefix, length, generator)[:, :-1]
        q, p = (m(context, use_cache=False).logits.softmax(-1) for m in (target, draft))
        values.append(torch.minimum(q, p).sum(-1)[:, prefix_tokens - 1 :].flatten())
    every = torch.cat(values)
    return Overlap(every.double().mean().item(), len(every), len(values) * 32, prefix_tokens)


@torch.inference_mode()
def forward_cost(target: LlamaForCausalLM, draft: LlamaForCausalLM, rounds: int = 60) -> Cost:
    """Time rounds of five draft forwards and one target forward, as a decode loop runs them.

    One row, one new token, 64 to 400 tokens in the cache.
    """
    models = {"target": target, "draft": draft}
    prompt = torch.full((1, 64), 5)
    caches = {k: m(prompt, use_cache=True).past_key_values for k, m in models.items()}
    taken: dict[str, list[float]] = {"target": [], "draft": []}
    for _ in range(rounds):
        for name in ["draft"] * DRAFTS_PER_ROUND + ["target"]:
            begun = time.perf_counter()
            models[name](prompt[:, :1], past_key_values=caches[name], use_cache=True)
            taken[name].append(1e3 * (time.perf_counter() - begun))
    cost = {name: median(times) for name, times in taken.items()}
    return Cost(cost["target"], cost["draft"], cost["draft"] / cost["target"])
