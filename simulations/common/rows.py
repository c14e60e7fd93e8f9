"""Next-token rows of a real pair of models along text that the target wrote."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base.terminal import Progress

Rows = Float[Tensor, "rows vocab"]


@torch.inference_mode()
def log_rows(
    target: Any, draft: Any, prompts_ids: Sequence[Sequence[int]], tokens_each: int, seed: int
) -> tuple[Rows, Rows]:
    """Sample text from the target at temperature 1 and return both models' rows along it.

    Parameters
    ----------
    target, draft : causal language models over one vocabulary of V tokens.
    prompts_ids : token ids of each prompt; only the last ones that fit are used.
    tokens_each : tokens sampled after each prompt; fewer where the text ends itself.
    seed : of the one generator that draws every token.

    Returns
    -------
    target_probs, draft_probs : (N, V) float64, row i of both given the same text; the
        log-softmax is taken in float64, so no token that has a finite logit is lost.

    Raises
    ------
    ValueError
        No prompt, an empty one, two vocabularies, or tokens_each outside the context.
    """
    _check(target, draft, prompts_ids, tokens_each)
    generator = torch.Generator().manual_seed(seed)
    room = min(model.config.max_position_embeddings for model in (target, draft)) - tokens_each
    logged: tuple[list[Tensor], list[Tensor]] = ([], [])
    with Progress("logging rows", len(prompts_ids)) as progress:
        for prompt in prompts_ids:
            prompt = list(prompt)[-room:]
            text = sample(target, prompt, tokens_each, generator)
            for model, rows in zip((target, draft), logged, strict=True):
                rows.append(next_token_probs(model, text)[len(prompt) - 1 : -1])
            progress.advance()
    return torch.cat(logged[0]), torch.cat(logged[1])


def sample(model: Any, prompt: Sequence[int], tokens: int, generator: torch.Generator) -> list[int]:
    """Return the prompt and up to ``tokens`` sampled ones, ending after an end-of-text token."""
    text, fresh, cache = list(prompt), list(prompt), None
    for _ in range(tokens):
        step = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        row = step.logits[0, -1].double().softmax(-1)
        fresh = torch.multinomial(row, 1, generator=generator).tolist()
        text += fresh
        if fresh[0] == model.config.eos_token_id:
            break
    return text


def next_token_probs(model: Any, text: Sequence[int]) -> Rows:
    """Return the model's row after each token of ``text``, (len(text), V) float64."""
    logits = model(torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).exp()


def _check(target: Any, draft: Any, prompts: Sequence[Sequence[int]], tokens_each: int) -> None:
    sizes = target.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"draft: must have the target's {sizes[0]} tokens; got {sizes[1]}")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts_ids: must hold prompts of at least one token; got {prompts!r}")
    most = min(model.config.max_position_embeddings for model in (target, draft)) - 1
    if not 1 <= tokens_each <= most:
        raise ValueError(f"tokens_each: must be from 1 to {most}; got {tokens_each!r}")
