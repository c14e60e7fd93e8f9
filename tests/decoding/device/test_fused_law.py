"""Texts whose rounds the kernels' numbers decide have the target's law, counted."""

import pytest
import torch

from tests.amounts import amount
from tests.decoding.device.test_fused import run
from tests.decoding.test_whole_texts import p_value

PROMPT = torch.tensor([[1, 0]])
VOCAB = 4
FALSE_ALARM = 1e-6  # per test, if the seed were drawn afresh
TEXTS = amount(1500, 10_000)
PAIRS = [(x, y) for x in range(VOCAB) for y in range(VOCAB)]


@pytest.fixture(scope="module")
def four_tokens(make_model, make_draft):
    options = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    target = make_model(vocab=VOCAB, layers=1, dtype=torch.float32, **options)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    return target, make_draft(target, noise=0.5, seed=4)


def next_law(model, *tokens):
    ids = torch.tensor([[*PROMPT[0].tolist(), *tokens]])
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1)


def three_token_law(model):
    law = torch.ones(1, dtype=torch.float64)
    for texts in ([()], [(x,) for x in range(VOCAB)], PAIRS):
        rows = torch.stack([next_law(model, *text).double() for text in texts])
        law = (law[:, None] * rows).flatten()
    return law


def counts_of(pair, verifier):
    """Return how often each text of three tokens came, of two rounds or more each."""
    options = {"policy": "speculative", "eos_token_ids": (), "meter": False, "seed": 0}
    options |= {"verifier": verifier, "max_new_tokens": 4}
    result = run(pair, {"input_ids": PROMPT.expand(TEXTS, 2)}, **options)
    cells = result.output_token_ids[:, :3] @ torch.tensor([VOCAB**2, VOCAB, 1])
    return torch.bincount(cells, minlength=VOCAB**3).double()


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_texts_over_several_rounds_have_the_targets_law(four_tokens, in_torch, verifier):
    counts = counts_of(four_tokens, verifier)
    assert p_value(counts, three_token_law(four_tokens[0])) > FALSE_ALARM
    assert p_value(counts, three_token_law(four_tokens[1])) < 1e-9  # the test has power
