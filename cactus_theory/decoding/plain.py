"""Token-by-token decoding with the target alone: the baseline of every speed-up."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding._checks import opened_text
from cactus_theory.decoding._model import CachedModel
from cactus_theory.decoding._sampling import checked_temperature, probabilities, uniforms
from cactus_theory.decoding.result import GenerationResult, Stopwatch
from cactus_theory.verify._draw import pick


def generate_plain(
    target_model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_token_ids: int | Iterable[int] | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> GenerationResult:
    """Sample from the target alone, one token a forward pass.

    Uses the same cache, the same probabilities and the same draws as
    :func:`cactus_theory.decoding.generate`, whose arguments it shares.

    Raises
    ------
    ValueError, TypeError
        As :func:`cactus_theory.decoding.generate`.
    """
    temperature = checked_temperature(temperature)
    text = opened_text({"target_model": target_model}, input_ids, max_new_tokens, eos_token_ids)
    target = CachedModel(target_model, text.buffer.shape[1])
    uniform = uniforms(seed, generator, text.buffer.device)
    clock = Stopwatch()
    with torch.inference_mode():
        while text.room:
            fed = text.behind(target.length)
            clock.lap("other")
            logits = target.feed(fed, 1)
            clock.lap("target")
            token = pick(probabilities(logits[:, 0], temperature), uniform(1))
            new = text.settle(token[None])
            clock.lap("other")
            if on_tokens is not None:
                on_tokens(new)
                clock.lap("callback")
    return GenerationResult(
        output_token_ids=torch.tensor([text.new_ids]),
        ended=text.ended,
        target_calls=target.calls,
        draft_calls=0,
        accepted_histogram=(target.calls,),
        seconds=clock.seconds(),
    )
