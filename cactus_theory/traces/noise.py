"""How far a target is from itself: rows of one pass over several tokens against one pass a token.

Rounding differs with the shape of a pass, so that a lossless decode that verifies K tokens at once
does not have the law of a decode without a draft to the last bit. What that costs in nats is the
floor under every budget: smaller ones cannot be told from nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.decoding._checks import dtype_of, whole_number
from cactus_theory.decoding.models import CachedModel
from cactus_theory.traces.estimate import ratio_of_sums
from cactus_theory.verify.draw import pick


@dataclass(frozen=True)
class NoiseFloor:
    """What passes of several tokens change.

    Attributes
    ----------
    kl_per_token, standard_error : mean KL of a wide pass's row from a single pass's, in nats, and
        its error over texts.
    rows : that were compared.
    width : tokens of a wide pass.
    dtype : of the model.

    Examples
    --------
    >>> floor = noise_floor(pair.target, [[1, 2], [3, 4]], max_new_tokens=8)
    >>> floor.rows, floor.dtype, floor.kl_per_token < 1e-9
    (16, 'float32', True)
    """

    kl_per_token: float
    standard_error: float
    rows: int
    width: int
    dtype: str


def noise_floor(
    target_model: Any,
    prompts_ids: Sequence[Sequence[int]],
    *,
    width: int = 5,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
    on_text: Callable[[int], None] | None = None,
) -> NoiseFloor:
    """Return the mean KL, in nats, of rows of passes of ``width`` tokens from those of one each.

    The texts are the target's own, drawn from the single passes; both have a cache of their own.

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    prompts_ids : token ids of each prompt.
    width : tokens of a wide pass: K + 1 where K are drafted.
    max_new_tokens : of a text.
    temperature : above 0; at 0 a changed token has no finite KL.
    seed : of the texts.
    on_text : called with how many are done.

    Raises
    ------
    ValueError
        No prompt or an empty one, sizes below 1, a temperature of 0, a family without a cache.

    Examples
    --------
    >>> noise_floor(pair.target, [[1, 2, 3]], width=3, max_new_tokens=6).width
    3
    """
    for name, size in {"width": width, "max_new_tokens": max_new_tokens}.items():
        whole_number(name, size, 1)
    check.number("temperature", temperature, 0, open_low=True)
    if not prompts_ids or not all(map(len, prompts_ids)):
        raise ValueError("prompts_ids: must hold prompts of at least one token; got none or empty")
    source = torch.Generator().manual_seed(seed)
    spent = np.zeros(len(prompts_ids))
    for number, prompt in enumerate(prompts_ids):
        coins = torch.rand(max_new_tokens, generator=source, dtype=torch.float64)
        ids, single = _one_by_one(target_model, list(prompt), coins, temperature)
        wide = _together(target_model, ids, len(prompt), width, temperature)
        spent[number] = float(_kl(wide, single).sum())
        if on_text is not None:
            on_text(number + 1)
    rows = np.full(len(spent), float(max_new_tokens))
    mean = ratio_of_sums(spent, rows, "floor")
    error = mean.standard_error
    return NoiseFloor(mean.value, error, int(rows.sum()), width, dtype_of([target_model]))


@torch.inference_mode()
def _one_by_one(
    model: Any, prompt: list[int], coins: Tensor, temperature: float
) -> tuple[list[int], Float[Tensor, "new vocab"]]:
    """Return the text that single passes write, and their log-probabilities after new tokens."""
    cached = CachedModel(model, len(prompt) + len(coins))
    ids, rows, fed = list(prompt), [], list(prompt)
    for coin in coins:
        row = _fed(cached, fed, 1, temperature)
        fed = [int(pick(row.exp(), coin[None].to(row.device)))]
        ids += fed
        rows.append(row)
    rows.append(_fed(cached, fed, 1, temperature))
    return ids, torch.cat(rows[1:])


@torch.inference_mode()
def _together(
    model: Any, ids: list[int], prompt: int, width: int, temperature: float
) -> Float[Tensor, "new vocab"]:
    """Return the same of passes over ``width`` tokens."""
    cached = CachedModel(model, len(ids))
    _fed(cached, ids[:prompt], 1, temperature)
    parts = [ids[start : start + width] for start in range(prompt, len(ids), width)]
    return torch.cat([_fed(cached, part, len(part), temperature) for part in parts])


def _fed(
    cached: CachedModel, ids: list[int], keep: int, temperature: float
) -> Float[Tensor, "keep vocab"]:
    tokens = torch.tensor([ids], device=cached.model.device)
    logits = cached.feed(tokens, [len(ids)], [keep])[0, :keep].double()
    return (logits / temperature).log_softmax(-1)


def _kl(log_h: Tensor, log_q: Tensor) -> Float[Tensor, "rows"]:
    """Return KL(h‖q) of rows of log-probabilities; both have the same zeros, if any."""
    gap = torch.where(log_h > -torch.inf, log_h - log_q, 0.0)
    return (log_h.exp() * gap).sum(-1).clamp(min=0.0)
