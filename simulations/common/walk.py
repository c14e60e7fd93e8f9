"""Texts that an emitted law writes itself, token by token and without rounds, in batches."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cactus_theory.decoding._text import Texts, fitted
from cactus_theory.decoding.drafters.own_weights import OwnWeights
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.options import own_ends
from cactus_theory.policies import Policy

Rows = Float[Tensor, "texts vocab"]


class Step(NamedTuple):
    """A token of every open text, with the text's number and rows of target, draft and law."""

    texts: list[int]
    q: Rows
    p: Rows
    h: Rows
    tokens: Int[Tensor, "texts"]


@torch.inference_mode()
def walked(
    pair: Any, prompts: Sequence[Sequence[int]], policy: Policy, limit: int, seed: int
) -> Iterator[Step]:
    """Yield the steps in which the policy's law writes on after each prompt, to its end or limit.

    Rows are float64 and of temperature 1; coins are of one generator, so that they depend on which
    prompts are together.
    """
    own, coins = isinstance(pair.draft, OwnWeights), torch.Generator().manual_seed(seed)
    texts = Texts(prompts, limit, own_ends(pair.target), torch.device("cpu"))
    draft = pair.draft.of(pair.target) if own else pair.draft
    models = [CachedModel(model, texts.capacity, len(prompts)) for model in (pair.target, draft)]
    size = pair.target.config.vocab_size
    while texts.batch:
        q, p = (_next_rows(model, texts, size) for model in models)
        h = policy.emitted(q, p)
        tokens = torch.multinomial(h, 1, generator=coins)[:, 0]
        yield Step(list(texts.numbers), q, p, h, tokens)
        texts.settle(tokens[:, None].tolist(), tokens)
        still = [row for row in range(texts.batch) if texts.room(row)]
        for part in (texts, *models) if len(still) < texts.batch else ():
            part.keep(still)


def _next_rows(model: CachedModel, texts: Texts, size: int) -> Rows:
    counts = [length - cached for length, cached in zip(texts.lengths, model.lengths, strict=True)]
    logits = model.feed(texts.take(model.lengths, counts), counts, [1] * texts.batch)
    return fitted(logits, size)[:, 0].double().softmax(-1)
