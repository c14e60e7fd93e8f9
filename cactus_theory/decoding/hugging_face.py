"""The entry for Hugging Face: ``model.generate(..., custom_generate=speculative_generate)``.

That hook forwards only parameters named in the signature below, and silently drops ``streamer``
and ``assistant_model``; use ``on_tokens`` and ``draft_model`` instead.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cactus_theory import _arguments as check
from cactus_theory.decoding._text import Stop
from cactus_theory.decoding.loop import generate
from cactus_theory.decoding.result import GenerationResult
from cactus_theory.decoding.schedule import Schedule, Spec
from cactus_theory.divergences import Divergence
from cactus_theory.verify.contract import Verifier

# stopping criteria that the loop handles itself
KNOWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def speculative_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: Any = None,
    *,
    draft_model: Any = None,
    policy: Spec | Schedule | Sequence[Spec | Schedule] = "speculative",
    num_draft_tokens: int = 5,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    adaptive: bool = False,
    gate: bool = False,
    verifier: str | Verifier = "chain",
    fast_forward: bool | None = None,
    meter: bool | str | Divergence = False,
    log_probs: bool = False,
    on_tokens: Callable[[Any], None] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode speculatively inside ``generate`` of a Hugging Face causal LM.

    ``model.generate(**inputs, custom_generate=speculative_generate, draft_model=draft,
    policy="cactus:delta=0.1", num_draft_tokens=5)``. Sampling or greedy search, logits
    processors (on both models), stopping criteria, end-of-text ids, lengths, left-padded
    batches and ``return_dict_in_generate`` work as they do without the hook; then the output
    also holds ``result``, a :class:`GenerationResult` with the statistics.

    Parameters
    ----------
    draft_model : a causal LM of the same vocabulary, or a drafter such as ``NGram()`` or
        ``ModelDrafter(draft, stop=0.3)``.
    seed : as :func:`cactus_theory.decoding.generate`; None takes one from PyTorch's global
        generator, as sampling inside ``generate`` does.
    on_tokens : called after every round with the new ids (one row) or a list of them per row.

    The other parameters are those of :func:`cactus_theory.decoding.generate`; the meter is off
    unless asked for.

    Raises
    ------
    ValueError
        No draft, beams, scores or logits in the output, inputs other than token ids; and as
        :func:`cactus_theory.decoding.generate`.

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
    _check(generation_config, model_kwargs, draft_model)
    if seed is None and generator is None:
        seed = int(torch.randint(2**62, ()))
    room = generation_config.max_length - input_ids.shape[1]
    result = generate(
        model,
        draft_model,
        input_ids,
        policy=policy,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=room,
        attention_mask=model_kwargs.get("attention_mask"),
        temperature=1.0 if generation_config.do_sample else 0.0,
        logits_processor=logits_processor,
        eos_token_ids=_ends(generation_config),
        stop=_stop(stopping_criteria),
        seed=0 if seed is None else seed,
        generator=generator,
        adaptive=adaptive,
        gate=gate,
        verifier=verifier,
        fast_forward=fast_forward,
        meter=meter,
        log_probs=log_probs,
        on_tokens=on_tokens,
    )
    sequences = _sequences(input_ids, result, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return output_class()(sequences=sequences, result=result)


def _check(config: Any, model_kwargs: dict[str, Any], draft_model: Any) -> None:
    """Raise for options that the loop would otherwise silently ignore."""
    if config is None:
        raise ValueError("generation_config: must be given; call model.generate(...), got None")
    if draft_model is None:
        raise ValueError("draft_model: must be a causal LM or a drafter; got None")
    if config.num_beams != 1:
        raise ValueError(f"num_beams: must be 1 for speculative decoding; got {config.num_beams}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name}: must be False for speculative decoding; got True")
    for name in ("inputs_embeds", "encoder_outputs"):
        if model_kwargs.get(name) is not None:
            raise ValueError(f"{name}: must not be given, the loop takes token ids; got a tensor")
    cached = model_kwargs.get("past_key_values")
    if cached is not None and cached.get_seq_length():
        raise ValueError(
            f"past_key_values: must be empty, the loop keeps its own cache; "
            f"got {cached.get_seq_length()} positions"
        )


def _ends(config: Any) -> list[int] | None:
    ends = config.eos_token_id
    return None if ends is None else [ends] if isinstance(ends, int) else [int(e) for e in ends]


def _stop(criteria: Sequence[Any]) -> Stop | None:
    """Return one callable for all criteria that the loop does not handle itself."""
    others = [one for one in criteria if type(one).__name__ not in KNOWN_CRITERIA]
    if not others:
        return None
    return lambda ids: any(bool(torch.as_tensor(one(ids, None)).all()) for one in others)


def _sequences(input_ids: Tensor, result: GenerationResult, config: Any) -> Tensor:
    """Return prompt and new ids (B, T + N), short rows padded as the library pads them."""
    new = result.output_token_ids.to(input_ids.device)
    ends = _ends(config)
    pad = config.pad_token_id
    pad = pad if isinstance(pad, int) else ends[0] if ends else 0
    return torch.cat([input_ids, torch.where(new < 0, pad, new)], 1)


@lru_cache(maxsize=1)
def output_class() -> Any:
    """Return the library's output class with a field ``result`` more."""
    from dataclasses import dataclass

    library = check.optional_module("transformers.generation.utils", "llm")

    @dataclass
    class SpeculativeOutput(library.GenerateDecoderOnlyOutput):
        """What ``generate`` returns, with the statistics of the decode."""

        result: GenerationResult | None = None

    return SpeculativeOutput
