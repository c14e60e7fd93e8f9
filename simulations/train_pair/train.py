"""Build a model, fit it for a fixed number of steps, surviving kills, and save it.

A run is a function of its plan: every random choice comes from one generator whose
state is saved with model, optimizer and step. On one thread a run that was killed and
resumed therefore ends with the same bits as one that was not. Losses are those of text and of the
target's distribution.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cactus_theory.base.terminal import Progress

from ..common.results import write_tensors
from .corpus import END_OF_TEXT_ID, Stream

# as long as the longest training windows: four times 256 tokens
MAX_POSITIONS = 1024
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)


@dataclass(frozen=True)
class Shape:
    """Layers, width and head size of a Llama model with tied embeddings."""

    layers: int
    width: int
    head_size: int = 32

    @property
    def feed_forward(self) -> int:
        """Inner width of the gated feed-forward block: 8/3 of the width, in steps of 32."""
        return -(-8 * self.width // (3 * 32)) * 32


def build(shape: Shape, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised float32 model; the global generator is left as it was."""
    if min(shape.layers, shape.width, shape.head_size) < 1:
        raise ValueError(f"layers, width and head size must be positive, got {shape}")
    if shape.width % shape.head_size:
        raise ValueError(f"head size must divide width, got {shape.head_size} and {shape.width}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(_config(shape, vocab_size))


def _config(shape: Shape, vocab_size: int) -> LlamaConfig:
    heads = shape.width // shape.head_size
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **SPECIAL,
    )


def num_parameters(model: nn.Module) -> int:
    """Count parameters, the tied embedding once."""
    return sum(p.numel() for p in model.parameters())


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, generation settings and float16 weights; ``model`` stays float32.

    The config says float32, which is what the weights are loaded as where nothing else is asked
    for: half precision is slow on a CPU, and a text then depends on the batch it is in.
    """
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(**SPECIAL)
    stored.half().save_pretrained(folder)
    stored.config.dtype = torch.float32
    stored.config.save_pretrained(folder)


# every eighth batch has windows four times as long, see text_batches
LONG_EVERY = 8
LONG_FACTOR = 4
Batches = Callable[[int, Generator], Tensor]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What a run does; a checkpoint of another plan is refused."""

    steps: int
    batch_size: int = 16
    length: int = 256
    peak_rate: float = 2.5e-3
    warmup_steps: int = 80
    decay: float = 0.35
    hold_steps: int = 0
    weight_decay: float = 0.1
    seed: int = 0
    half: bool = True

    @property
    def tokens(self) -> int:
        """Number of predicted tokens in the whole run."""
        return self.steps * self.batch_size * self.length

    def rate(self, step: int) -> float:
        """Warm up linearly, hold, then fall linearly, never below 2 % of the peak.

        The fall is a line to zero at the end, over the last ``decay`` of the steps; before
        ``hold_steps`` it does not count. Until it does nothing depends on ``steps``: runs
        of other lengths agree.
        """
        rise = (step + 1) / max(1, self.warmup_steps)
        fall = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.peak_rate * max(0.02, min(1.0, rise, fall if step >= self.hold_steps else 1.0))


@dataclass(frozen=True)
class Outcome:
    """What a finished run reports."""

    tokens: int
    seconds: float
    final_loss: float


def text_batches(stream: Stream, plan: Plan, share_at_starts: float = 0.25) -> Batches:
    """Return a sampler of windows (rows, length + 1) of the stream.

    Most windows begin anywhere; a share begins at a document or top-level definition,
    half of those after an end-of-text token, so that short prompts are familiar. Every
    eighth batch has four times the length and a quarter of the rows. ValueError if the stream is
    shorter than one long window.
    """
    longest = LONG_FACTOR * plan.length + 1
    if len(stream.tokens) <= longest:
        raise ValueError(f"stream must exceed {longest} tokens, got {len(stream.tokens)}")
    starts = stream.starts[stream.starts < len(stream.tokens) - longest]

    def batch(step: int, generator: Generator) -> Tensor:
        long = step % LONG_EVERY == LONG_EVERY - 1 and plan.batch_size >= LONG_FACTOR
        rows = plan.batch_size // LONG_FACTOR if long else plan.batch_size
        length = (plan.length * LONG_FACTOR if long else plan.length) + 1
        begin = torch.randint(len(stream.tokens) - longest, (rows,), generator=generator)
        if len(starts):
            start = starts[torch.randint(len(starts), (rows,), generator=generator)]
            at_start = torch.rand(rows, generator=generator) < share_at_starts
            begin = torch.where(at_start, start, begin)
            after = at_start & (torch.rand(rows, generator=generator) < 0.5)
        else:
            after = torch.zeros(rows, dtype=torch.bool)
        index = begin[:, None] - after[:, None].long() + torch.arange(length)
        window = stream.tokens[index].long()
        window[after, 0] = END_OF_TEXT_ID
        return window

    return batch


def text_loss(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """Return the mean next-token loss in nats of a window (rows, length + 1)."""
    logits = model(window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def fit(
    model: nn.Module,
    plan: Plan,
    batches: Batches,
    loss: Loss,
    checkpoint: Path,
    *,
    label: str,
    every_s: float = 60.0,
    stop_after: int | None = None,
) -> Outcome:
    """Run the plan from the checkpoint if there is one, else from the start.

    ``stop_after`` ends the call early at that step with a checkpoint, as a kill would. ValueError
    if the checkpoint belongs to a different plan.
    """
    optimizer = _optimizer(model, plan)
    generator = Generator().manual_seed(plan.seed)
    state = _resume(checkpoint, plan, model, optimizer, generator)
    last = plan.steps if stop_after is None else min(stop_after, plan.steps)
    start = saved = time.monotonic()
    first, before, value = state["step"], state["seconds"], state["loss"]
    model.train()
    with Progress(label, plan.steps, state["step"]) as progress:
        for step in range(state["step"], last):
            window = batches(step, generator)
            value = _step(model, optimizer, plan, step, window, loss)
            now = time.monotonic()
            speed = (step + 1 - first) * plan.batch_size * plan.length / max(1e-9, now - start)
            progress.update(step + 1, f"loss {value:.3f} nats, {speed:,.0f} tokens/s")
            if now - saved >= every_s or step + 1 == last:
                state = {"step": step + 1, "seconds": before + now - start, "loss": value}
                _save(checkpoint, plan, model, optimizer, generator, state)
                saved = now
    model.eval()
    return Outcome(state["step"] * plan.batch_size * plan.length, state["seconds"], state["loss"])


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.95), fused=True)


def _step(model, optimizer, plan: Plan, step: int, window: Tensor, loss: Loss) -> float:
    for group in optimizer.param_groups:
        group["lr"] = plan.rate(step)
    with torch.autocast("cpu", torch.bfloat16, enabled=plan.half):
        value = loss(model, window)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def _save(path: Path, plan: Plan, model, optimizer, generator: Generator, state: dict) -> None:
    checkpoint = {
        "plan": asdict(plan),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
        "state": state,
    }
    write_tensors(path, checkpoint)


def _resume(path: Path, plan: Plan, model, optimizer, generator: Generator) -> dict:
    if not path.exists():
        return {"step": 0, "seconds": 0.0, "loss": float("nan")}
    checkpoint = torch.load(path, weights_only=True)
    if checkpoint["plan"] != asdict(plan):
        raise ValueError(f"checkpoint {path.name} must come from {plan}, got {checkpoint['plan']}")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    generator.set_state(checkpoint["generator"])
    return checkpoint["state"]


def mixed_batches(pool: Tensor, text: Batches, share: float) -> Batches:
    """Return a sampler that replaces a share of each text batch by rows of the pool.

    Batches whose windows have another length than the pool's rows stay pure text.
    """

    def batch(step: int, generator: Generator) -> Tensor:
        window = text(step, generator)
        if window.shape[1] != pool.shape[1]:
            return window
        rows = round(share * len(window))
        index = torch.randint(len(pool), (rows,), generator=generator)
        return torch.cat([pool[index].long(), window[rows:]])

    return batch


def distil_loss(target: LlamaForCausalLM) -> Loss:
    r"""Return the mean forward divergence :math:`KL(q \| p)` in nats a position.

    q is the target's full distribution and p the draft's, at temperature 1.
    """

    def loss(draft: LlamaForCausalLM, window: Tensor) -> Tensor:
        context = window[:, :-1]
        with torch.no_grad():
            log_q = target(context, use_cache=False).logits.float().log_softmax(-1)
        log_p = draft(context, use_cache=False).logits.float().log_softmax(-1)
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()

    return loss


def overlap_loss(target: LlamaForCausalLM) -> Loss:
    r"""Return the mean total variation :math:`1 - \sum \min(q, p)` a position.

    It is the chance that lossless verification rejects. Its gradient vanishes where p has
    almost nothing, so it finishes a draft that already learned by :func:`distil_loss`.
    """

    def loss(draft: LlamaForCausalLM, window: Tensor) -> Tensor:
        context = window[:, :-1]
        with torch.no_grad():
            q = target(context, use_cache=False).logits.float().softmax(-1)
        p = draft(context, use_cache=False).logits.float().softmax(-1)
        return 1 - torch.minimum(q, p).sum(-1).mean()

    return loss


def distil_plan(steps: int, text: Plan, rate: float) -> Plan:
    """Return the distillation's plan: the text plan with its own steps, rate and seed."""
    return replace(text, steps=steps, peak_rate=rate, decay=0.6, seed=text.seed + 1)


def overlap_plan(steps: int, text: Plan, rate: float) -> Plan:
    """Return the last stage's plan: the rate falls from the start."""
    return replace(text, steps=steps, peak_rate=rate, decay=1.0, seed=text.seed + 2)
