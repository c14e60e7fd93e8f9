from types import SimpleNamespace

import pytest
import torch

from simulations.common.walk import log_rows
from tests.decoding.conftest import random_llama


def tiny(seed):
    return random_llama(vocab=23, layers=1, positions=32, seed=seed, dtype=torch.float32)


def test_rows_are_those_of_texts_that_the_target_samples():
    pair, prompts = SimpleNamespace(target=tiny(0), draft=tiny(1)), [[1, 2, 3], [4]]
    rows = log_rows(pair, prompts, 5, seed=7)
    assert all(own.shape == (10, 23) and own.dtype == torch.float64 for own in rows)
    coins = torch.Generator().manual_seed(7)
    for number, prompt in enumerate(prompts):
        text = list(prompt)
        for row in rows[0][5 * number : 5 * number + 5]:
            coin = torch.rand(1, dtype=torch.float64, generator=coins)
            text.append(int((row.cumsum(0) > coin * row.sum()).long().argmax()))
        for model, own in zip((pair.target, pair.draft), rows, strict=True):
            with torch.inference_mode():
                whole = model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1].double()
            torch.testing.assert_close(
                own[5 * number : 5 * number + 5], whole.softmax(-1), atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("tokens", [0, 32])
def test_texts_that_do_not_fit_are_refused(tokens):
    pair = SimpleNamespace(target=tiny(0), draft=tiny(1))
    with pytest.raises(ValueError, match=f"tokens_each: must be from 1 to 31; got {tokens}"):
        log_rows(pair, [[1]], tokens, seed=0)
