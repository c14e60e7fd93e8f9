"""The two architectures and how they are saved."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from ..common.inputs import load_model as load
from .corpus import END_OF_TEXT_ID

# as long as the longest training windows: four times 256 tokens
MAX_POSITIONS = 1024

__all__ = ["MAX_POSITIONS", "Shape", "build", "load", "num_parameters", "save"]


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
    """Return a freshly initialised float32 model; the global RNG is left as found.

    Raises
    ------
        ValueError: the head size does not divide the width, or a size is not positive.
    """
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
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
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
    stored.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID
    )
    stored.half().save_pretrained(folder)
    stored.config.dtype = torch.float32
    stored.config.save_pretrained(folder)
