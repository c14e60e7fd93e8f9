"""Decode prompts: keywords or one object of options in, a result out.

The stages behind them, in order: ``options`` checks what was asked for, ``prepare`` the models
and prompts; ``rounds`` drafts, verifies and measures until every text has ended, on the host
(``host``) or on a GPU (``device``); ``result`` says what came out.
"""

from collections.abc import Collection
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from cactus_theory.decoding.device import on_device
from cactus_theory.decoding.host import HostRounds
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.prepare import Opening, dtype_of, warn_of_emulation
from cactus_theory.decoding.result import GenerationResult


def generate(
    target_model: Any, draft_model: Any, input_ids: Tensor, **options: Any
) -> GenerationResult:
    """Continue texts with drafted tokens that the target verifies under ``policy``.

    Every round the draft proposes up to K tokens a row, the target scores them in one forward
    pass, the policy accepts a prefix and one more token follows. With the policy
    ``speculative`` a text has exactly the target's law; at temperature 0 it is the target's
    greedy text. Every row has its own seed and length and behaves as if it were alone, in
    float32 and float64: in half precision a row's logits depend on the batch it is in.

    Parameters
    ----------
    target_model : a Hugging Face causal LM in evaluation mode.
    draft_model : another one of the same vocabulary, or a drafter, such as ``NGram()`` or
        ``ModelDrafter(model, stop=0.3)``, which drafts fewer tokens where it is unsure. None is
        the target alone: one token a row and forward pass, nothing to draft, meter or record.
    input_ids : (B, T) int64, T ≥ 1.
    policy : a Policy, a spec such as ``"cactus:delta=0.1"``, or a Schedule of them; or a list
        of B of these.
    num_draft_tokens : K ≥ 1; fewer are drafted where fewer than K + 1 tokens have room.
    max_new_tokens : never exceeded; T + max_new_tokens must fit both models' positions.
    attention_mask : (B, T), 0 on padding (in front of shorter prompts), which takes no position.
    temperature : of both models; 0 is greedy, and nearly so with ``regret``, a policy for 0 alone,
        which sees the target's rows at temperature 1; a policy that keeps to the target's tokens
        relaxes nothing there.
    logits_processor : Hugging Face processors, applied to both models before the temperature.
        They see prompts as they were given, padding included. Those of your own are for one text.
    eos_token_ids : tokens that end a text, anywhere in a round; ``()`` for none. The default is
        the target's own, ``generation_config.eos_token_id``.
    stop : called after each new token of a row with the row's ids (1, length) and the number of
        them that are the prompt's; True ends the row.
    seed : randomness: an integer (row b takes seed + b) or one per row. The default is 0.
    verifier : how drafts are verified: ``chain`` (token by token), ``block`` (each drafted path
        as a whole, which accepts more), ``tree`` (as ``block`` for a path, and a walk for trees
        of a drafter that declares their laws), or a Verifier.
    fast_forward : whether Llama-like models run through this package's own forward pass
        (True, refusing others), the library's (False), or whichever fits (None). Both
        compute the same function up to rounding.
    meter : also add up the emitted KL, for ``regret`` the regret, or the divergence named; its
        time is kept out of the decode's.
    record_rows : also return the verified rows.
    log_probs : also return ln q and ln h of every new token; needs the meter, which has the
        emitted laws.
    callbacks : what is called after every round: :class:`Callbacks`.
    device_loop : whether rounds run as one captured graph each, with one read by the host
        (:mod:`cactus_theory.decoding.device`): True requires it, None takes it on a GPU where it
        fits. It takes Llama-like models, chains and blocks of tokens drafted by a model, and one
        policy a text; no processors, ``stop``, ``record_rows``, ``on_rows`` or
        ``on_round``. On a GPU the fused kernels of
        :mod:`cactus_theory.kernels` verify where they can: one policy that has one, float32 or
        shorter logits, Triton. They have random numbers of their own, so that a seed gives
        other tokens than in the usual loop. ``"torch"`` requires the loop with the tokens of
        the usual one, ``"kernels"`` requires the kernels.

    Returns
    -------
    output_token_ids : (B, N) int64, the new tokens of each row, the end-of-text token
        included, padded with −1 to the longest row.
    row_ended : whether each text ended by itself.
    row_rounds : (drafted, accepted, ended inside) → how many rounds did that, of each row.
    target_calls, draft_calls : forward passes of the batch; the prompt is part of the first.
    seconds : where the time went.
    reading : what all rows took and emitted together, with every count and rate.
    rows : the verified rows, None unless they were recorded.
    token_charges : (B, N) float64, what the meter charged for each new token: 0 for a bonus token,
        one that was not drafted, and padding. Sums over a row are what that row spent; the sum
        over its first t tokens is what an answer that ended there would have spent.
    row_directions : (B, 3) float64, Σ over a row's new tokens of entropy, surprise and agreement.
    log_probs : ``target`` and ``emitted``, (B, N): ln q and ln h of each new token; None unless
        asked for.
    dtype : of the models, or of target and draft where they differ (``float32, float16``).
    loop : which loop ran: ``device`` or ``host``, with the reason where the device loop was
        to be taken if it fits and does not. ``device, by kernels`` where the fused kernels
        verified, and ``device, by torch`` with the reason where they were to and could not.

    Notes
    -----
    Rules, processors, callbacks and schedules of your own get copies: all may keep them, and all
    but rules may change them. Weights are read when a decode begins: whoever changes them
    during one changes the next.

    Raises
    ------
    ValueError
        Vocabularies or devices that differ, ids or lengths out of range, a model in training
        mode, an unknown policy, seeds or policies that are not one per row, a schedule whose
        guarantee the verifier would break, ``log_probs`` without the meter.
    TypeError
        Ids that are not integers, a draft that is neither a model nor a drafter.
    DecodingError
        A row without a law, since a processor leaves no token or the logits hold NaN; it
        carries the result up to then.

    Warns
    -----
    UserWarning
        Half precision that a CPU emulates, probabilities where logits belong, a lossy policy that
        relaxes nothing at temperature 0.

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
    """Let a function that takes ``**options`` show those of a decode but ``known``; return them."""
    shown, named = signature(function), signature(DecodeOptions).parameters
    own, more = list(shown.parameters.values()), [own for own in named if own not in known]
    rest = own[-1:] if known else []  # what else it takes
    function.__signature__ = shown.replace(
        parameters=[*own[:-1], *(named[name] for name in more), *rest]
    )
    return more


show_keywords(generate)


def decode(
    target_model: Any, draft_model: Any, input_ids: Tensor, options: DecodeOptions
) -> GenerationResult:
    """Do what :func:`generate` does, whose keywords ``options`` has.

    Raises
    ------
    ValueError, TypeError, DecodingError
        As :func:`generate`, for what depends on models and prompts.
    """
    options = options.at_ends_of(target_model)
    opening = Opening(target_model, draft_model, input_ids, options)
    if opening.drafter is not None:
        warn_of_emulation(opening.models)
    with torch.inference_mode():
        device, loop = on_device(opening)
        result = (device or HostRounds(opening)).run()
    return replace(result, loop=loop, dtype=dtype_of(opening.models.values()))
