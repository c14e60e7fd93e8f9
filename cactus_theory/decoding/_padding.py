"""Prompts of different lengths as one batch."""

from collections.abc import Sequence
from typing import Any

import torch


def left_padded(prompts: Sequence[Sequence[int]], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask (B, longest) of prompts set against the right edge."""
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    marks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=model.device), torch.tensor(marks, device=model.device)
