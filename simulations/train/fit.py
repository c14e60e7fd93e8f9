"""Build a model, train it for a fixed number of steps with checkpoints, and save it.

The plan determines a run: every random choice comes from one generator, whose state is saved with
model, optimizer and step. So on one thread a run that was killed and resumed gives the same bits as
an uninterrupted run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cactus_theory.base.terminal import Progress

from ..common.results import write_tensors
from .corpus import END_OF_TEXT_ID, MAX_POSITIONS, Stream

SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)


def build(
    layers: int, width: int, vocab_size: int, seed: int, head_size: int = 32
) -> LlamaForCausalLM:
    """Return a new float32 Llama with tied embeddings; the global generator is not changed."""
    if width % head_size:
        raise ValueError(f"head size must divide width, got {head_size} and {width}")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=-(-8 * width // (3 * 32)) * 32,  # 8/3 of the width, in steps of 32
        num_hidden_layers=layers,
        num_attention_heads=width // head_size,
        num_key_value_heads=width // head_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **SPECIAL,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, generation settings and float16 weights; ``model`` stays float32.

    The config names float32, so that weights are loaded as float32 by default: half precision is
    slow on a CPU, and makes a text depend on the other texts of its batch.
    """
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(**SPECIAL)
    stored.half().save_pretrained(folder)
    stored.config.dtype = torch.float32
    stored.config.save_pretrained(folder)


# every LONG_EVERY-th batch has windows LONG_FACTOR times as long, see text_batches
LONG_EVERY = 8
LONG_FACTOR = 4
# share of windows that begin at a document or a top-level definition
SHARE_AT_STARTS = 0.25
# seconds between two checkpoints
EVERY_S = 60.0
Batches = Callable[[int, Generator], Any]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Plan:
    """The settings of a training run."""

    steps: int
    batch_size: int = 16
    length: int = 256
    peak_rate: float = 2.5e-3
    warmup_steps: int = 80
    decay: float = 0.35
    weight_decay: float = 0.1
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise, the peak, then a linear fall.

        The fall takes the last share ``decay`` of the steps. No rate is below 2 % of the peak.
        """
        rise = (step + 1) / max(1, self.warmup_steps)
        fall = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.peak_rate * max(0.02, min(1.0, rise, fall))


def text_batches(stream: Stream, batch_size: int, length: int) -> Batches:
    """Return a sampler of windows (rows, length + 1) of the stream.

    Most windows begin anywhere. The share SHARE_AT_STARTS begins at a document or a top-level
    definition, half of them after an end-of-text token, so that the model learns short prompts.
    Every eighth batch has four times the length and a quarter of the rows. Raises ValueError if the
    stream is shorter than one long window.
    """
    longest = LONG_FACTOR * length + 1
    if len(stream.tokens) <= longest + 1:
        raise ValueError(f"stream must exceed {longest + 1} tokens, got {len(stream.tokens)}")
    starts = stream.starts[stream.starts < len(stream.tokens) - longest]

    def batch(step: int, generator: Generator) -> Tensor:
        long = step % LONG_EVERY == LONG_EVERY - 1 and batch_size >= LONG_FACTOR
        factor = LONG_FACTOR if long else 1
        rows = batch_size // factor
        begin = torch.randint(len(stream.tokens) - longest, (rows,), generator=generator)
        start = starts[torch.randint(len(starts), (rows,), generator=generator)]
        at_start = torch.rand(rows, generator=generator) < SHARE_AT_STARTS
        after = at_start & (torch.rand(rows, generator=generator) < 0.5)
        begin = torch.where(at_start, start, begin) - after.long()
        index = begin[:, None] + torch.arange(factor * length + 1)
        window = stream.tokens[index].long()
        window[after, 0] = END_OF_TEXT_ID
        return window

    return batch


def text_loss(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """Return the mean next-token loss in nats of a window (rows, length + 1)."""
    logits = model(window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def fit(
    model: nn.Module, plan: Plan, batches: Batches, loss: Loss, checkpoint: Path
) -> dict[str, Any]:
    """Train by the plan, from the checkpoint if there is one; return tokens, seconds and loss."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
    for weight in model.parameters():
        groups[weight.ndim >= 2]["params"].append(weight)
    optimizer = torch.optim.AdamW(
        groups, plan.peak_rate, (0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    generator = Generator().manual_seed(plan.seed)
    parts = {"model": model, "optimizer": optimizer}
    state = _resume(checkpoint, parts, generator)
    start = saved = time.monotonic()
    first, before, value = state["step"], state["seconds"], state["loss"]
    model.train()
    progress = Progress(checkpoint.stem, plan.steps, state["step"])
    for step in range(state["step"], plan.steps):
        window = batches(step, generator)
        value = _step(model, optimizer, plan, step, window, loss)
        now = time.monotonic()
        speed = (step + 1 - first) * plan.batch_size * plan.length / max(1e-9, now - start)
        progress.update(step + 1, f"loss {value:.3f} nats, {speed:,.0f} tokens/s")
        if now - saved >= EVERY_S or step + 1 == plan.steps:
            state = {"step": step + 1, "seconds": before + now - start, "loss": value}
            kept = {name: part.state_dict() for name, part in parts.items()}
            kept |= {"generator": generator.get_state(), "state": state}
            write_tensors(checkpoint, kept)
            saved = now
    model.eval()
    tokens = state["step"] * plan.batch_size * plan.length
    return {"tokens": tokens, "seconds": state["seconds"], "final_loss": state["loss"]}


def _step(model, optimizer, plan: Plan, step: int, window: Tensor, loss: Loss) -> float:
    for group in optimizer.param_groups:
        group["lr"] = plan.rate(step)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model, window)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def _resume(path: Path, parts: dict[str, Any], generator: Generator) -> dict[str, Any]:
    if not path.exists():
        return {"step": 0, "seconds": 0.0, "loss": float("nan")}
    checkpoint = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    generator.set_state(checkpoint["generator"])
    return checkpoint["state"]


def target_loss(target: LlamaForCausalLM, loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return the mean over positions of a loss of the target's and the draft's logits."""

    def mean(draft: LlamaForCausalLM, window: Tensor) -> Tensor:
        context = window[:, :-1]
        with torch.no_grad():
            logits = target(context, use_cache=False).logits
        return loss(logits, draft(context, use_cache=False).logits).mean()

    return mean
