"""Speculative decoding inside ``generate`` of Hugging Face models, by ``custom_generate=``.

``generate`` forwards the parameters in the signature of :func:`speculative_generate`, except
``streamer``, ``tokenizer`` and ``assistant_model``: transformers silently drops these three (in
releases 5.17 to 5.23). Use ``text_streamer``, ``text_tokenizer`` and ``draft_model`` instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cactus_theory.base import arguments as check
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.generate import decode, show_keywords
from cactus_theory.decoding.hugging_face_options import check_honoured
from cactus_theory.decoding.options import NO_CALLBACKS, Callbacks, DecodeOptions, check_stop
from cactus_theory.decoding.result import GenerationResult
from cactus_theory.decoding.text import Stop
from cactus_theory.divergences import Divergence

# stopping criteria of transformers that the loop replaces, and criteria that judge text by text
KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
BY_ROW = ("MaxTimeCriteria", "StopStringCriteria")


def speculative_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: Any = None,
    *,
    draft_model: Any = None,
    meter: bool | str | Divergence | None = None,
    text_streamer: Any = None,
    text_tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode speculatively inside ``generate`` of a Hugging Face causal LM.

    Call ``model.generate(**inputs, custom_generate=speculative_generate, draft_model=draft,
    policy="cactus:delta=0.1", num_draft_tokens=5)``. Sampling or greedy search, logits
    processors (on both models), stopping criteria, end-of-text ids, lengths, left-padded
    batches and ``return_dict_in_generate`` work as in plain ``generate``. With
    ``return_dict_in_generate`` the output also has ``result``, a :class:`GenerationResult`.

    Parameters
    ----------
    draft_model : a causal LM of the same vocabulary, a drafter such as ``NGram()`` or
        ``ModelDrafter(draft, stop=0.3)``, or the folder of an EAGLE-3 head.
    seed : as :func:`cactus_theory.generate`; with None the seed comes from PyTorch's global
        generator, as sampling inside ``generate`` does.
    log_probs : ln q and ln h of every new token, in ``result.log_probs``; switches the meter on.
    text_streamer : a streamer of transformers, such as ``TextStreamer``. The streamer gets the
        same calls as ``streamer=`` in plain ``generate``: the prompt, one call per new token as
        soon as a round has verified the token, and ``end``. Do not use ``streamer=``: transformers
        drops it silently before calling this function, and the streamer gets the prompt only.
    stop_strings : strings that end a text; the token that completes a string is kept. As in plain
        ``generate`` a string may begin in the prompt; a function ``stop`` can avoid this, since
        ``stop`` gets the prompt's length. Strings in a ``GenerationConfig`` raise an error in
        transformers, which does not pass on the tokenizer.
    text_tokenizer : the tokenizer for ``stop_strings``; transformers drops ``tokenizer=`` silently.
    meter : as :func:`cactus_theory.generate`; by default on with ``return_dict_in_generate``, where
        the output can hold the reading, else off.

    Notes
    -----
    The other parameters are those of :func:`cactus_theory.generate`. Pass a tuned setting by
    ``do_sample=True, **ct.load_tuned(file).options``.

    A processor that keeps state, such as the matcher of a grammar, is called once for each emitted
    token. For drafted tokens a copy is called, made by pickling or by the processor's ``fork()``.

    Raises
    ------
    ValueError
        No draft (``assistant_model=`` is dropped as ``streamer=`` is); an option of ``generate``
        that :mod:`cactus_theory.decoding.hugging_face_options` does not list, with a value that has
        an effect (beams, guidance, scores in the output, …); an input beside token ids and their
        mask, such as images, token types or a cache; processors that cannot be copied; in a batch,
        processors (:mod:`cactus_theory.decoding.processors`) and criteria of your own, a streamer,
        and time limits or stop strings without an end-of-text id; stop strings without
        ``text_tokenizer``; and as :func:`cactus_theory.generate`.

    Examples
    --------
    >>> inputs = pair.tokenizer("def f(", return_tensors="pt")
    >>> output = pair.target.generate(
    ...     **inputs, do_sample=True, max_new_tokens=8, custom_generate=speculative_generate,
    ...     draft_model=pair.draft, policy="band:price=1", return_dict_in_generate=True,
    ... )
    >>> output.result.num_tokens
    8
    """
    options = {name: model_kwargs.pop(name) for name in NAMED if name in model_kwargs}
    check_honoured(model, input_ids, generation_config, model_kwargs, draft_model)
    if meter is None:
        meter = bool(generation_config.return_dict_in_generate)
    criteria = [*stopping_criteria, *_strings(stop_strings, text_tokenizer)]
    others = [one for one in criteria if not _is_library_criterion(one, KNOWN_CRITERIA)]
    if len(input_ids) > 1:
        _check_batch(criteria, others, text_streamer)
    if options.get("seed") is None:
        options["seed"] = int(torch.randint(2**62, (), device="cpu"))
    length, ends = _limits(criteria, generation_config)
    pad = generation_config.pad_token_id
    if not isinstance(pad, int):
        pad = ends[0] if ends else 0
    callbacks = options.pop("callbacks", NO_CALLBACKS)
    decode_options = DecodeOptions(
        max_new_tokens=length - input_ids.shape[1],
        attention_mask=model_kwargs.get("attention_mask"),
        temperature=1.0 if generation_config.do_sample else 0.0,
        logits_processor=logits_processor,
        eos_token_ids=ends,
        stop=_stop(others, input_ids, options.pop("stop", None)),
        meter=meter or options.get("log_probs", False),
        callbacks=streamed(callbacks, text_streamer),
        **options,
    )
    drafter = as_drafter(draft_model)
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())
    result = decode(model, drafter, input_ids, decode_options)
    if text_streamer is not None:
        text_streamer.end()
    new = result.output_token_ids.to(input_ids.device)
    sequences = torch.cat([input_ids, torch.where(new < 0, pad, new)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return output_class()(sequences=sequences, result=result)


# keywords of a decode that are not keywords of transformers' ``generate``
NAMED = show_keywords(
    speculative_generate,
    "max_new_tokens attention_mask temperature logits_processor eos_token_ids meter "
    "record_rows".split(),
)


def _is_library_criterion(one: Any, names: Sequence[str]) -> bool:
    kind = type(one)
    return kind.__name__ in names and kind.__module__ == "transformers.generation.stopping_criteria"


def _limits(criteria: Sequence[Any], config: Any) -> tuple[int, list[int]]:
    """Return a text's maximum length and the end-of-text ids, from criteria or else ``config``."""
    known = [vars(one) for one in criteria if _is_library_criterion(one, KNOWN_CRITERIA)]
    lengths = [attributes["max_length"] for attributes in known if "max_length" in attributes]
    ends = [attributes["eos_token_id"] for attributes in known if "eos_token_id" in attributes]
    if not ends and config.eos_token_id is not None:
        ends = [torch.as_tensor(config.eos_token_id, device="cpu")]
    ids = [token for several in ends for token in several.flatten().tolist()]
    return min(lengths, default=config.max_length), ids


def _strings(stop_strings: str | Sequence[str] | None, tokenizer: Any) -> list[Any]:
    """Return transformers' stopping criterion for the strings, in a list; empty without strings."""
    if not stop_strings:
        return []
    if tokenizer is None:
        raise ValueError(
            "text_tokenizer: must be given along with stop_strings (tokenizer= does not reach a "
            "function in custom_generate=); got None"
        )
    library = check.optional_module("transformers", "llm")
    return [library.StopStringCriteria(tokenizer, stop_strings)]


def _check_batch(criteria: Sequence[Any], others: Sequence[Any], streamer: Any) -> None:
    """Raise ValueError for a streamer or a stopping criterion that a batch does not support.

    Texts of a batch have different lengths here, so that criteria are called with one text each.
    ``others`` are the criteria that the decode loop does not replace.
    """
    if streamer is not None:
        raise ValueError("text_streamer: supports one text only; got a batch")
    ends = any(_is_library_criterion(one, ("EosTokenCriteria",)) for one in criteria)
    for criterion in others:
        by_row = _is_library_criterion(criterion, BY_ROW)
        if not (ends and by_row):
            more = ", or beside an eos_token_id" if by_row else ""
            raise ValueError(
                f"stopping_criteria: {type(criterion).__name__} must be asked about one text at a "
                f"time{more}; got a batch"
            )


def _stop(criteria: Sequence[Any], input_ids: Tensor, more: Stop | None) -> Stop | None:
    """Return one ``stop`` function that applies the criteria and ``more``, the user's ``stop``."""
    if more is not None:
        check_stop(more)
    if not criteria:
        return more

    def stop(ids: Tensor, prompt_length: int) -> bool:
        if more is not None and more(ids.clone(), prompt_length):
            return True
        if len(input_ids) == 1:  # criteria get the prompt with its padding
            ids = torch.cat([input_ids, ids[:, prompt_length:].to(input_ids.device)], 1)
        return any(
            bool(torch.as_tensor(ends(ids.clone(), None), device="cpu").all()) for ends in criteria
        )

    return stop


def streamed(callbacks: Callbacks, streamer: Any) -> Callbacks:
    """Return callbacks that also pass new tokens to ``streamer``; unchanged without a streamer."""
    if streamer is None:
        return callbacks

    def on_tokens(new: Any) -> None:
        for token in new:
            streamer.put(torch.tensor([token], device="cpu"))
        if callbacks.on_tokens is not None:
            callbacks.on_tokens(new)

    return replace(callbacks, on_tokens=on_tokens)


@lru_cache(maxsize=1)
def output_class() -> Any:
    """Return transformers' output class with an additional field ``result``."""
    library = check.optional_module("transformers.generation.utils", "llm")

    @dataclass
    class SpeculativeOutput(library.GenerateDecoderOnlyOutput):
        """Output of ``generate`` with the statistics of the decode."""

        result: GenerationResult | None = None

    return SpeculativeOutput
