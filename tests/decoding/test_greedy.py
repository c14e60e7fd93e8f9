"""At temperature 0 speculation may change the cost of a text, never the text."""

import pytest
import torch

from cactus_theory.decoding import EarlyExit, ModelDrafter, NGram, Siblings, generate
from tests.amounts import amount

NEW = 16


@pytest.fixture(scope="module")
def two_hundred(tiny):
    """200 prompts of 1 to 12 tokens, left-padded, and the target's greedy texts."""
    source = torch.Generator().manual_seed(12)
    lengths = torch.randint(1, 13, (200,), generator=source)
    ids = torch.randint(0, 24, (200, 12), generator=source)
    mask = (torch.arange(12) >= 12 - lengths[:, None]).long()
    options = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_ids": 6}
    plain = generate(tiny[0], None, ids, attention_mask=mask, **options)
    return ids, mask, plain.output_token_ids


@pytest.mark.filterwarnings("ignore:policy. band.price=1.0 relaxes nothing at temperature 0")
@pytest.mark.parametrize("name", ["model", "ngram", "early exit", "block", "siblings"])
@pytest.mark.parametrize("batch", [1, 8])
def test_two_hundred_texts_equal_plain_greedy(tiny, two_hundred, name, batch):
    target, model = tiny
    draft = {
        "model": model,
        "block": model,
        "ngram": NGram(),
        "early exit": EarlyExit(1),
        "siblings": Siblings(ModelDrafter(model), 3),
    }[name]
    judge = {"policy": "speculative"}
    if name in ("block", "siblings"):
        judge = {"policy": "band:price=1", "verifier": "block" if name == "block" else "tree"}
    ids, mask, plain = two_hundred
    rows = range(0, amount(16 if batch == 1 else 48, 200), batch)
    accepted = 0
    for start in rows:
        own = slice(start, start + batch)
        shortest = 0 if batch > 1 else int((mask[start] == 0).sum())
        result = generate(
            target,
            draft,
            ids[own, shortest:],
            attention_mask=mask[own, shortest:],
            num_draft_tokens=4,
            max_new_tokens=NEW,
            temperature=0.0,
            eos_token_ids=6,
            **judge,
        )
        assert result.reading.emitted_divergence == 0
        for row, length in enumerate(result.row_lengths):
            text = result.output_token_ids[row, :length].tolist()
            assert text == [token for token in plain[start + row].tolist() if token >= 0]
        accepted += result.num_accepted
    assert accepted > len(rows) * batch
