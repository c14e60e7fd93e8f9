"""Check the arguments of the decoding loops before the first forward pass."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.models import text_config
from cactus_theory.decoding.vocabulary import check_ids

HALF = (torch.float16, torch.bfloat16)
# a draft with so many times its target's parameters is no draft; a little more may be meant
SWAPPED = 1.5


def dtype_of(models: Iterable[Any]) -> str:
    """Return the name of the models' dtype, or their names in order where they differ."""
    return ", ".join(dict.fromkeys(str(model.dtype).removeprefix("torch.") for model in models))


def warn_of(models: Mapping[str, Any]) -> None:
    """Warn of half precision on a CPU, and of a draft that is larger than its target."""
    for name, model in models.items():
        if model.dtype in HALF and model.device.type == "cpu":
            warnings.warn(
                f"{name}: {type(model).__name__} runs in {dtype_of([model])} on a CPU, which may "
                "take longer than plain decoding in float32, and a text may depend on the batch "
                "it is in; load it with dtype=torch.float32",
                stacklevel=3,
            )
            break
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models.values()]
    if len(sizes) == 2 and sizes[1] > SWAPPED * sizes[0]:
        warnings.warn(
            f"draft_model: has more parameters ({sizes[1]:,}) than target_model ({sizes[0]:,}); "
            "are they swapped?",
            stacklevel=3,
        )


def whole_number(name: str, value: Any, low: int) -> int:
    """Return ``value`` if it is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: must be an integer of at least {low}; got {value!r}")
    return value


def opened_texts(
    models: dict[str, Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    eos_token_ids: int | Iterable[int] | None,
) -> tuple[Texts, list[int]]:
    """Return prompts with room for ``max_new_tokens``, and how many places each leaves out.

    Checks them against the models.
    """
    whole_number("max_new_tokens", max_new_tokens, 1)
    _check_prompt(input_ids)
    first = next(iter(models))
    for name, model in models.items():
        _check_model(name, model, input_ids, max_new_tokens)
        if model.device != models[first].device:
            raise ValueError(
                f"{name}: device must equal that of {first} ({models[first].device}); "
                f"got {model.device}"
            )
    shown = _shown(input_ids, attention_mask)
    rows = zip(input_ids.tolist(), shown, strict=True)
    prompts = [[token for token, on in zip(*row, strict=True) if on] for row in rows]
    device = models[first].device
    texts = Texts(prompts, max_new_tokens, _end_tokens(eos_token_ids), device)
    return texts, [own.count(False) for own in shown]


def _shown(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[bool]]:
    """Return which tokens of each prompt the models see; masked ones take no position."""
    batch, length = input_ids.shape
    if attention_mask is None:
        return [[True] * length] * batch
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask: shape must be that of input_ids {(batch, length)}; "
            f"got {tuple(attention_mask.shape)}"
        )
    shown = attention_mask.bool().tolist()
    for row, own in enumerate(shown):
        if not own[-1]:
            raise ValueError(
                "attention_mask: must be 1 on the last token of a prompt (pad in front); "
                f"got 0 in row {row}"
            )
    return shown


def _check_prompt(input_ids: Any) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: must be an int64 tensor; got {found}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids: shape must be (B, T) with at least one token; got {tuple(input_ids.shape)}"
        )


def _check_model(name: str, model: Any, input_ids: Tensor, max_new_tokens: int) -> None:
    if model.training:
        raise ValueError(f"{name}: must be in evaluation mode, call {name}.eval(); got training")
    config = text_config(model)
    check_ids("input_ids", input_ids, config.vocab_size)
    longest = getattr(config, "max_position_embeddings", None)
    wanted = input_ids.shape[1] + max_new_tokens
    if longest is not None and 0 < longest < wanted:  # −1 stands for no limit
        raise ValueError(
            f"max_new_tokens: prompt and new tokens must fit the {longest} positions of "
            f"{name}; got {input_ids.shape[1]} + {max_new_tokens} = {wanted}"
        )


def _end_tokens(eos_token_ids: int | Iterable[int] | None) -> frozenset[int]:
    if eos_token_ids is None:
        return frozenset()
    given = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
    for token in given:
        whole_number("eos_token_ids", token, 0)
    return frozenset(given)
