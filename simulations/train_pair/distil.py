"""Teach the draft the target's distribution on text the target wrote itself."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, Tensor
from transformers import LlamaForCausalLM, StaticCache

from ..common.progress import Progress
from ..common.results import write_tensors
from .corpus import END_OF_TEXT_ID, Stream
from .train import Batches, Loss, Plan

# tokens that the target's samples begin with, from end-of-text alone to some context
PREFIX_LENGTHS = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class PoolPlan:
    """How much the target writes: ``chunks`` files of ``rows`` sequences, one seed each."""

    chunks: int
    rows: int = 128
    length: int = 257
    seed: int = 0


def prefixes(stream: Stream, rows: int, length: int, generator: Generator) -> Tensor:
    """Return (rows, length) beginnings of documents or top-level definitions.

    Each is led by end-of-text, so length 1 is end-of-text alone.

    Raises
    ------
        ValueError: no boundary is followed by ``length`` tokens.
    """
    starts = stream.starts[stream.starts < len(stream.tokens) - length]
    if not len(starts):
        raise ValueError(f"stream must have a boundary {length} tokens before its end, got none")
    begin = starts[torch.randint(len(starts), (rows,), generator=generator)]
    rest = stream.tokens[begin[:, None] + torch.arange(length - 1)].long()
    return torch.cat([torch.full((rows, 1), END_OF_TEXT_ID), rest], dim=1)


@torch.inference_mode()
def sample(model: LlamaForCausalLM, prefix: Tensor, length: int, generator: Generator) -> Tensor:
    """Continue ``prefix`` (rows, k) at temperature 1 to (rows, length), past end-of-text too.

    The cache has its final size from the start: growing one copies it at every token.
    """
    cache = StaticCache(config=model.config, max_cache_len=length)
    tokens, last = [prefix], prefix
    for _ in range(length - prefix.shape[1]):
        out = model(last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        probs = out.logits[:, -1].float().softmax(-1)
        last = torch.multinomial(probs, 1, generator=generator)
        tokens.append(last)
    return torch.cat(tokens, dim=1)


def build_pool(target: LlamaForCausalLM, stream: Stream, plan: PoolPlan, folder: Path) -> Tensor:
    """Return (chunks * rows, length) int32 samples of the target, one file per chunk.

    Chunks already on disk are kept, so a killed call goes on where it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pool = []
    with Progress("target samples", plan.chunks) as progress:
        for chunk in range(plan.chunks):
            path = folder / f"{plan.seed}-{plan.rows}x{plan.length}-{chunk:04d}.pt"
            if not path.exists():
                write_tensors(path, _sample_chunk(target, stream, plan, chunk))
            pool.append(torch.load(path, weights_only=True))
            progress.advance()
    return torch.cat(pool)


def mixed_batches(pool: Tensor, text: Batches, share: float) -> Batches:
    """Return a sampler that replaces a share of each text batch by rows of the pool.

    Batches whose windows have another length than the pool's rows stay pure text.
    """

    def batch(step: int, generator: Generator) -> Tensor:
        window = text(step, generator)
        if window.shape[1] != pool.shape[1]:
            return window
        rows = round(share * len(window))
        chosen = torch.randint(len(pool), (rows,), generator=generator)
        return torch.cat([pool[chosen].long(), window[rows:]])

    return batch


def distil_loss(target: LlamaForCausalLM) -> Loss:
    r"""Return the mean forward divergence :math:`KL(q \| p)` in nats a position.

    q is the target's full distribution and p the draft's, at temperature 1.
    """

    def loss(draft: LlamaForCausalLM, window: Tensor) -> Tensor:
        context = window[:, :-1]
        with torch.no_grad():
            wanted = target(context, use_cache=False).logits.float().log_softmax(-1)
        given = draft(context, use_cache=False).logits.float().log_softmax(-1)
        return (wanted.exp() * (wanted - given)).sum(-1).mean()

    return loss


def overlap_loss(target: LlamaForCausalLM) -> Loss:
    r"""Return the mean total variation :math:`1 - \sum \min(q, p)` a position.

    It is the chance that lossless verification rejects. Its gradient vanishes where p has
    almost nothing, so it finishes a draft that already learned by :func:`distil_loss`.
    """

    def loss(draft: LlamaForCausalLM, window: Tensor) -> Tensor:
        context = window[:, :-1]
        with torch.no_grad():
            wanted = target(context, use_cache=False).logits.float().softmax(-1)
        given = draft(context, use_cache=False).logits.float().softmax(-1)
        return 1 - torch.minimum(wanted, given).sum(-1).mean()

    return loss


def distil_plan(steps: int, text: Plan, rate: float) -> Plan:
    """Return the distillation's plan: the text plan with its own steps, rate and seed."""
    return replace(text, steps=steps, peak_rate=rate, decay=0.6, seed=text.seed + 1)


def overlap_plan(steps: int, text: Plan, rate: float) -> Plan:
    """Return the last stage's plan: the rate falls from the start."""
    return replace(text, steps=steps, peak_rate=rate, decay=1.0, seed=text.seed + 2)


def _sample_chunk(target, stream: Stream, plan: PoolPlan, chunk: int) -> Tensor:
    generator = Generator().manual_seed(plan.seed * 100_003 + chunk)
    lengths = [k for k in PREFIX_LENGTHS if k < plan.length]
    prefix = prefixes(stream, plan.rows, lengths[chunk % len(lengths)], generator)
    return sample(target, prefix, plan.length, generator).to(torch.int32)
