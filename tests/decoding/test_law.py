"""A processor's cut reaches both models: seeded chi-square of sampled texts against enumeration."""

import pytest
import torch
import transformers

from cactus_theory.decoding import generate
from tests.amounts import amount

PROMPT = torch.tensor([[1, 0]])
VOCAB = 4
FALSE_ALARM = 1e-6  # per test, if the seed were drawn afresh


@pytest.fixture(scope="module")
def four_tokens(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=1, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    return target, make_draft(target, noise=0.5, seed=4)


def next_law(model, *tokens):
    ids = torch.tensor([[*PROMPT[0].tolist(), *tokens]])
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1)


def p_value(counts, law):
    expected = law * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(law) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def test_masked_drafts_have_the_masked_target_law(four_tokens):
    """Rows of a batch, with seeds of their own, are a sample of independent texts."""
    target, model = four_tokens
    cut = transformers.TopPLogitsWarper(0.8)
    rows = [PROMPT, *(torch.tensor([[*PROMPT[0].tolist(), token]]) for token in range(VOCAB))]
    laws = {}
    for one in four_tokens:
        with torch.inference_mode():
            found = [cut(ids, one(input_ids=ids).logits[:, -1])[0].softmax(-1) for ids in rows]
        laws[one] = torch.cat([share * row for share, row in zip(found[0], found[1:], strict=True)])
    count = amount(1500, 3000)
    options = {"policy": "speculative", "num_draft_tokens": 2, "logits_processor": [cut]}
    result = generate(target, model, PROMPT.expand(count, -1), max_new_tokens=3, **options)
    pairs = result.output_token_ids[:, :2] @ torch.tensor([VOCAB, 1])
    counts, law = pairs.bincount(minlength=VOCAB**2).double(), laws[target]
    assert counts[law == 0].sum() == 0 and (law == 0).any() and (laws[model] == 0).any()
    assert p_value(counts[law > 0], law[law > 0]) > FALSE_ALARM
