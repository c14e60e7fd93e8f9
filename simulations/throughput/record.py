"""What is kept of one decode: how long it took, what came out, what it cost, how good it is."""

from __future__ import annotations

import codeop
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..common.decode import Decoded, Harness
from ..common.grid import Job


def record(harness: Harness, texts: Sequence[str], job: Job, metered: bool) -> dict[str, Any]:
    """Decode one group and return its line of the journal.

    ``metered`` adds cost and quality; what such a decode took is no speed to report.
    """
    done = harness.decode(job.config, job.group, again=job.repeat, meter=metered)
    if not metered:
        return done.record
    return done.record | _quality(harness, texts, harness.group(job.config.batch, job.group), done)


def _quality(harness: Harness, texts: Sequence[str], rows: range, done: Decoded) -> dict[str, Any]:
    pair = harness.pair
    likelihoods, parsed = [], []
    for row, output in zip(rows, done.outputs, strict=True):
        likelihoods.append(target_log_likelihood(pair.target, harness.prompts[row], output))
        text = pair.tokenizer.decode(output, skip_special_tokens=True)
        parsed.append(parses_so_far(texts[row], text))
    lengths = [len(output) for output in done.outputs]
    return {"log_likelihood": likelihoods, "lengths": lengths, "parses": parsed}


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
