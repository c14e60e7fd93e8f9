"""Token-by-token decoding with the target alone: the baseline of every speed-up."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding._checks import dtype_of, opened_texts
from cactus_theory.decoding._round import Decode, OnRound
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._sampling import Coins, Generators, checked_temperature
from cactus_theory.decoding._text import Stop
from cactus_theory.decoding._warp import Warp
from cactus_theory.decoding.device import on_device
from cactus_theory.decoding.loop import per_round
from cactus_theory.decoding.pace import FixedPace
from cactus_theory.decoding.result import GenerationResult
from cactus_theory.verify.registry import find_verifier


def generate_plain(
    target_model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    logits_processor: Sequence[Any] = (),
    eos_token_ids: int | Iterable[int] | None = None,
    stop: Stop | None = None,
    seed: int | Sequence[int] | None = None,
    generator: Generators = None,
    on_tokens: Callable[[Any], None] | None = None,
    device_loop: bool | str | None = False,
    on_round: OnRound | None = None,
) -> GenerationResult:
    """Sample from the target alone, one token a row and forward pass.

    Uses the same forward pass, cache, probabilities and draws as
    :func:`cactus_theory.decoding.generate`, whose arguments it shares.

    Raises
    ------
    ValueError, TypeError, DecodingError
        As :func:`cactus_theory.decoding.generate`.

    Examples
    --------
    >>> ids = pair.tokenizer("def f(", return_tensors="pt").input_ids
    >>> result = generate_plain(pair.target, ids, max_new_tokens=8)
    >>> result.num_tokens, result.target_calls
    (8, 8)
    """
    temperature = checked_temperature(temperature)
    models = {"target_model": target_model}
    texts, padding = opened_texts(models, input_ids, attention_mask, max_new_tokens, eos_token_ids)
    texts.stop = stop
    coins = Coins(texts.batch, seed, generator, texts.device)
    warp = Warp(temperature, logits_processor, padding)
    rules = Rules("speculative", texts)
    common = texts, rules, warp, coins, FixedPace(0), 0, find_verifier("chain")
    report, dtype = per_round(on_tokens, texts.batch), dtype_of(models.values())
    with torch.inference_mode():
        quick, loop = on_device(device_loop, target_model, None, *common, on_round=on_round)
        if quick is not None:
            return replace(quick.run(report), loop=loop, dtype=dtype)
        decode = Decode(target_model, None, *common, on_round=on_round)
        return replace(decode.run(report), loop=loop, dtype=dtype)
