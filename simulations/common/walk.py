"""Sample texts from a target, token by token, and keep both models' rows along these texts.

Used by ``price-travels`` and ``table frontier``, which compute policies on such rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.base.tensors import normalised
from cactus_theory.base.terminal import Progress
from cactus_theory.decoding.drafters.own_weights import OwnWeights
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.options import own_ends
from cactus_theory.decoding.text import Texts, fitted
from cactus_theory.verify.draw import pick

Rows = Float[Tensor, "texts vocab"]


class Step(NamedTuple):
    """A step of sampling: a token for each open text, with the texts' numbers and both rows."""

    texts: list[int]
    q: Rows
    p: Rows
    tokens: Int[Tensor, "texts"]


@torch.inference_mode()
def walked(
    pair: Any, prompts: Sequence[Sequence[int]], limit: int, generator: torch.Generator
) -> Iterator[Step]:
    """Sample a text from the target after each prompt; yield one step per token.

    A text stops at an end token or after ``limit`` tokens. Rows are float32 or wider, at
    temperature 1, on the target's device. The random numbers are drawn on a CPU, one for each open
    text, so a text depends on the other prompts of its batch.
    """
    texts = Texts(prompts, limit, own_ends(pair.target), pair.target.device)
    draft = pair.draft.of(pair.target) if isinstance(pair.draft, OwnWeights) else pair.draft
    models = [CachedModel(model, texts.capacity, len(prompts)) for model in (pair.target, draft)]
    size = pair.target.config.vocab_size
    while texts.batch:
        q, p = (_next_rows(model, texts, size) for model in models)
        coins = torch.rand(len(q), dtype=torch.float64, generator=generator)
        tokens = pick(normalised(q), coins.to(q.device))
        yield Step([text.number for text in texts.rows], q, p, tokens)
        texts.settle(tokens[:, None].tolist(), tokens)
        still = [row for row, text in enumerate(texts.rows) if text.room]
        for part in (texts, *models) if len(still) < texts.batch else ():
            part.keep(still)


def _next_rows(model: CachedModel, texts: Texts, size: int) -> Rows:
    counts = [length - cached for length, cached in zip(texts.lengths, model.lengths, strict=True)]
    logits = model.feed(texts.take(model.lengths, counts), counts, [1] * texts.batch)
    logits = fitted(logits, size)[:, 0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)


def log_rows(
    pair: Any, prompts_ids: Sequence[Sequence[int]], tokens_each: int, seed: int
) -> tuple[Rows, Rows]:
    """Return target and draft rows along texts sampled from the target, (N, V) float64 each.

    After each prompt ``tokens_each`` tokens are sampled at temperature 1, fewer if the text ends; a
    long prompt is cut to its last ids. Row i of both models is for the same text. Raises ValueError
    if ``tokens_each`` does not fit into the context.
    """
    configs = pair.target.config, getattr(pair.draft, "config", pair.target.config)
    longest = min(config.max_position_embeddings for config in configs) - tokens_each
    if tokens_each < 1 or longest < 1:
        most = longest + tokens_each - 1
        raise ValueError(f"tokens_each: must be from 1 to {most}; got {tokens_each}")
    steps = list[Step]()
    coins = torch.Generator().manual_seed(seed)
    progress = Progress("logging rows", len(prompts_ids))
    for prompt in prompts_ids:
        steps += walked(pair, [prompt[-longest:]], tokens_each, coins)
        progress.advance()
    q, p = ([getattr(step, side) for step in steps] for side in "qp")
    return normalised(torch.cat(q)), normalised(torch.cat(p))
