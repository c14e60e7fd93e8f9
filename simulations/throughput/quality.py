"""What can be checked by machine about a completion."""

from __future__ import annotations

import codeop
import warnings
from collections.abc import Sequence
from typing import Any

import torch


def parses_so_far(prompt: str, completion: str) -> bool | None:
    """Say whether the text up to its last whole line can still become a Python program.

    None if the prompt's own whole lines cannot, or no line of the completion is whole.
    """
    whole = _whole_lines(prompt + completion)
    if not _can_become_python(_whole_lines(prompt)) or len(whole) <= len(prompt):
        return None
    return _can_become_python(whole)


@torch.inference_mode()
def target_log_likelihood(
    model: Any, prompt: Sequence[int], completion: Sequence[int]
) -> float | None:
    """Return the target's mean ln q of the completion's tokens at temperature 1, nats a token."""
    if not len(completion):
        return None
    text = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    rows = logits.double().log_softmax(-1)
    return float(rows.gather(-1, text[0, len(prompt) :, None]).mean())


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _can_become_python(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in a string
        try:
            codeop.compile_command(text.rstrip() + "\n", symbol="exec")
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False
    return True
