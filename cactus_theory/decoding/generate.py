"""Decode prompts speculatively: :func:`generate` by keywords, :func:`decode` by an options object.

A decode has four stages. ``options`` checks the keywords. ``prepare`` checks the models and the
prompts. ``rounds`` drafts, verifies and measures until every text has ended, on the host
(``host_rounds``) or on a GPU (``device``). ``result`` holds the tokens and the statistics.
"""

from collections.abc import Collection
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.device import on_device
from cactus_theory.decoding.host_rounds import HostRounds
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.prepare import Opening, dtype_of, warn_of_emulation
from cactus_theory.decoding.result import GenerationResult


def generate(
    target_model: Any, draft_model: Any, input_ids: Tensor, **options: Any
) -> GenerationResult:
    """Continue prompts with tokens that a draft proposes and the target verifies under ``policy``.

    In each round the draft proposes up to K tokens for each text, and the target scores all of
    them in one forward pass. The policy accepts a prefix of the drafted tokens, and one recovered
    or bonus token follows. With the policy ``speculative`` a text has exactly the target's
    distribution; at temperature 0 the text is the target's greedy text. Every text has a separate
    seed and length, and the other texts of the batch do not change its tokens in float32 and
    float64. In half precision the logits of a text depend on the batch that contains the text.

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    draft_model : a second causal LM with the target's vocabulary, or a drafter, such as ``NGram()``
        or ``ModelDrafter(model, stop=0.3)``, which drafts fewer tokens where the model is unsure.
        With None the target decodes alone: one token per text and forward pass, and nothing is
        drafted, metered or recorded.
    input_ids : (B, T) int64, T ≥ 1, the prompts.
    policy : a Policy, a spec such as ``"cactus:delta=0.1"``, or a Schedule, which changes policies
        along a text; or a list with B such entries, one for each text.
    num_draft_tokens : K ≥ 1, the most drafted tokens of a round. Fewer tokens are drafted where a
        text has room for fewer than K + 1 new tokens.
    max_new_tokens : the most new tokens of a text. T + max_new_tokens must fit the positions of
        the target; a draft model stops drafting where its positions end.
    attention_mask : (B, T), 0 on padding. Padding stands in front of shorter prompts and takes no
        position.
    temperature : of both models; 0 is greedy decoding, where a policy is lossless if it emits only
        tokens of q > 0. ``regret`` is a policy for temperature 0 alone: decoding stays nearly
        greedy, and the policy reads the target's rows at temperature 1.
    logits_processor : Hugging Face processors, applied to both models before the temperature.
        Processors read the prompts as given, padding included. A processor of your own needs a
        batch of one text.
    eos_token_ids : tokens that end a text, anywhere in a round; ``()`` for none. The default is
        the target's ``generation_config.eos_token_id``.
    stop : function called after each new token with the ids of the text (1, length) and the number
        of ids in the prompt; True ends the text.
    seed : seed of the random numbers: an integer (text b uses seed + b), or one integer per text.
        The default is 0.
    verifier : how drafts are verified: ``chain`` (token by token), ``block`` (each drafted path
        as a whole, which accepts more), ``tree`` (a path as ``block`` does; also the trees of a
        drafter such as ``Siblings``), or a Verifier.
    fast_forward : which forward pass Llama-like models run through: the pass of this package
        (True, an error for other models), the pass of transformers (False), or the pass of this
        package where the model is supported (None). Both passes compute the same function up to
        rounding.
    meter : whether to add up the divergence of the emitted laws from the target: True for KL (for
        ``regret``: the regret), or the name of a divergence. The seconds of the meter are not part
        of the decode's seconds.
    record_rows : whether to return ``rows``, the nodes at which drafted tokens were verified.
    log_probs : also return ln q and ln h of every new token; needs the meter, which computes the
        emitted laws.
    callbacks : functions that are called after every round: :class:`Callbacks`.
    device_loop : whether each round runs on the device, as one CUDA graph whose result the host
        reads once (:mod:`cactus_theory.decoding.device`). True requires this loop; None uses the
        loop on a GPU if the loop supports the decode. The loop supports Llama-like models, chains
        and blocks of tokens drafted by a model, and one policy per text, without processors,
        ``stop``, ``record_rows``, ``on_rows`` and ``on_round``. On a GPU the fused kernels of
        :mod:`cactus_theory.kernels` verify if all texts have the same policy, the policy has a
        kernel, logits have at most 32 bits and Triton is installed. The kernels draw other random
        numbers, so that a seed gives other tokens than the host loop does. ``"torch"`` requires the
        device loop with the tokens of the host loop, ``"kernels"`` requires the kernels.

    Returns
    -------
    output_token_ids : (B, N) int64, the new tokens of each text, the end-of-text token
        included, padded with −1 to the longest text.
    row_ended : for each text, whether an end-of-text token or ``stop`` ended the text.
    row_rounds : for each text, (drafted, accepted, ended) → the number of such rounds; ``ended`` is
        whether the text ended before the last token of the round.
    target_calls, draft_calls : forward passes of the batch; the prompt is part of the first pass.
    seconds : the wall-clock seconds by part of the decode.
    reading : counts, rates and metered divergence of all texts together.
    rows : the nodes at which drafted tokens were verified, each with the target's row q and the
        draft's row p; empty unless ``record_rows``.
    token_charges : (B, N) float64, the meter's charge for each new token: 0 for padding and, unless
        the policy has a tilt or is ``truncated``, for bonus tokens and tokens of rounds without a
        draft. The sum over a row is the divergence that the text spent; the sum over the first t
        tokens is the divergence that an answer ending there would have spent.
    row_directions : (B, 3) float64, the sums of entropy, surprise and agreement over a text's new
        tokens, as :class:`Reading` defines them.
    log_probs : ``target`` and ``emitted``, (B, N): ln q and ln h of each new token; None unless
        requested.
    dtype : of the models, or of target and draft where they differ (``float32, float16``).
    loop : which loop ran: ``device`` or ``host``; after ``host`` stands the reason, if a device
        loop was allowed and does not support the decode. ``device, by kernels`` if the fused
        kernels verified; ``device, by torch`` and the reason if the kernels could not.

    Notes
    -----
    Your policies, processors, callbacks and schedules get copies of tensors. All may keep the
    copies, and all but policies may change the copies. Weights are read when a decode begins: a
    change during a decode takes effect in the next decode.

    Raises
    ------
    ValueError
        Vocabularies or devices that differ, ids or lengths out of range, a model in training
        mode, an unknown policy, seeds or policies that are not one per text, a schedule whose
        guarantee the verifier would break, ``log_probs`` without the meter.
    TypeError
        Ids that are not integers, a draft that is neither a model nor a drafter.
    DecodingError
        A row that is no distribution, because a processor leaves no token or the logits hold NaN;
        the error carries the result of the rounds before.

    Warns
    -----
    UserWarning
        Half precision that a CPU emulates, probabilities where logits belong, a lossy policy that
        is lossless at temperature 0.

    Examples
    --------
    >>> ids = pair.tokenizer("def f(", return_tensors="pt").input_ids
    >>> result = ct.generate(pair.target, pair.draft, ids, policy="band:price=1", max_new_tokens=16)
    >>> result.output_token_ids.shape
    torch.Size([1, 16])
    >>> 0 <= result.reading.emitted_divergence_per_token < 1
    True
    >>> ct.generate(pair.target, None, ids, max_new_tokens=8).target_calls
    8
    """
    return decode(target_model, draft_model, input_ids, DecodeOptions(**options))


def show_keywords(function: Any, known: Collection[str] = ()) -> list[str]:
    """Show the keywords of a decode in the signature of ``function``; return their names.

    ``function`` takes the keywords as ``**options``. Keywords in ``known`` are left out, as
    ``function`` names or sets them already.
    """
    shown, named = signature(function), signature(DecodeOptions).parameters
    *first, double_starred = shown.parameters.values()
    names = [name for name in named if name not in known]
    rest = [double_starred] if known else []  # with ``known``, the function takes further keywords
    parameters = [*first, *(named[name] for name in names), *rest]
    function.__signature__ = shown.replace(parameters=parameters)
    return names


show_keywords(generate)


def decode(
    target_model: Any, draft_model: Any, input_ids: Tensor, options: DecodeOptions
) -> GenerationResult:
    """Decode as :func:`generate` does, with the keywords in one ``options`` object.

    Raises
    ------
    ValueError, TypeError, DecodingError
        As :func:`generate`, for errors that depend on models and prompts.
    """
    options = options.at_ends_of(target_model)
    opening = Opening(target_model, draft_model, input_ids, options)
    if opening.drafter is not None:
        warn_of_emulation(opening.models)
    with torch.inference_mode():
        device, loop = on_device(opening)
        result = (device or HostRounds(opening)).run()
    return replace(result, loop=loop, dtype=dtype_of(opening.models.values()))
