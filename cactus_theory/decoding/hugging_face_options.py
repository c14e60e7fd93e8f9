"""Options and inputs of ``generate`` that ``speculative_generate`` honours; others raise an error.

An option that is not listed must have a value at which it does nothing. So options of later
releases of transformers are rejected with an error until they are listed here.
"""

from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check

# fields of a GenerationConfig that are honoured: they end texts, change which tokens are allowed,
# or shape the output, most through processors and criteria of transformers; the last change no text
HONOURED = frozenset(
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings eos_token_id "
    "pad_token_id bos_token_id do_sample temperature top_k top_p min_p top_h typical_p "
    "epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens sequence_bias watermarking_config num_return_sequences "
    "return_dict_in_generate use_cache max_cache_len disable_compile early_stopping length_penalty "
    "decoder_start_token_id transformers_version".split()
)
# values at which an option does nothing, beside None, False and transformers' defaults
NEUTRAL = {"guidance_scale": (1,), "penalty_alpha": (0,)}
NEUTRAL |= {"cache_implementation": ("dynamic", "static")}
# inputs of the model that the decode loop makes, as ``generate`` does
OWN = ("attention_mask", "use_cache", "logits_to_keep")
CACHES = ("past_key_values", "cache_params")
# methods of transformers' decode loop; a class that overrides one needs a loop of its own
LOOP = ("_sample", "_prefill", "_update_model_kwargs_for_generation")
INSTEAD = "generate takes it without custom_generate"
# options of assisted generation in transformers → the option to use here
OURS = {"prompt_lookup_num_tokens": "draft_model=NGram()",
        "num_assistant_tokens": "num_draft_tokens=",
        "assistant_confidence_threshold": "draft_model=ModelDrafter(draft, stop=)",
        "assistant_early_exit": "draft_model=EarlyExit(layers)"}  # fmt: skip


def check_honoured(
    model: Any, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any], draft_model: Any
) -> None:
    """Raise ValueError for an option or input of ``generate`` that the decode would ignore.

    A call without a draft, and a model that has an encoder or overrides transformers' decode loop,
    raise ValueError, too.
    """
    if config is None:
        raise ValueError("generation_config: must be given; call model.generate(...), got None")
    _check_options(config)
    if draft_model is None:
        raise ValueError(
            "draft_model: must be a causal LM or a drafter (assistant_model= does not reach a "
            "function in custom_generate=); got None"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: must have no encoder for speculative decoding; got {type(model).__name__}"
        )
    mixin = check.optional_module("transformers", "llm").GenerationMixin
    for name in LOOP:
        if getattr(type(model), name, None) is not getattr(mixin, name):
            raise ValueError(
                f"model: must be decoded by the library's own loop; {type(model).__name__} has a "
                f"{name} of its own"
            )
    for name, value in model_kwargs.items():
        if value is not None and name not in OWN:
            _check_input(name, value, input_ids, model_kwargs.get("attention_mask"))


def _check_options(config: Any) -> None:
    """Raise ValueError for an unlisted option with a value that would have an effect."""
    defaults = config._get_default_generation_params()
    for name in vars(type(config)()):  # transformers ignores further names
        value, default = getattr(config, name, None), defaults.get(name)
        if name in HONOURED or name[0] == "_" or value is None or value is False:
            continue
        neutral = NEUTRAL.get(name, ()) + (() if default is None else (default,))
        if value not in neutral:
            rule = " or ".join(map(repr, neutral or (None,)))
            ours = f"here it is {OURS[name]}" if name in OURS else INSTEAD
            raise ValueError(
                f"{name}: must be {rule} for speculative decoding ({ours}); got {value!r:.60}"
            )


def _check_input(name: str, value: Any, input_ids: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError for an input of the model that the decode would not pass on."""
    if name in CACHES:
        library = check.optional_module("transformers", "llm")
        made_by_library = type(value) in (library.DynamicCache, library.StaticCache)
        if made_by_library and not getattr(value, "_is_user_defined", False):
            return
        rule = "must not be given, the loop keeps its own cache"
    elif name == "position_ids":
        if _counted(value, input_ids, mask):
            return
        rule = "must count the tokens of the attention mask from 0, or not be given"
    elif name == "mm_encoder_outputs" and not value:
        return
    else:
        rule = "must not be given, the loop feeds models token ids and nothing else"
    kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(f"{name}: {rule} ({INSTEAD}); got {kind}")


def _counted(position_ids: Tensor, input_ids: Tensor, mask: Tensor | None) -> bool:
    """Return whether ``position_ids`` are the positions that a decode gives the prompts' tokens."""
    visible = torch.ones_like(input_ids).bool() if mask is None else mask.bool()
    if position_ids.shape[-1] != visible.shape[-1]:
        return False
    return bool(((position_ids == visible.cumsum(-1) - 1) | ~visible).all())
