"""Sampled texts have the law they claim: seeded chi-square against enumeration."""

import pytest
import torch

from cactus_theory.decoding import generate, generate_plain
from cactus_theory.emitted import emitted_law
from cactus_theory.policies import policy
from tests.amounts import amount, some

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


def two_token_law(model):
    first = next_law(model)
    return torch.cat([first[x] * next_law(model, x) for x in range(VOCAB)])


def p_value(counts, law):
    expected = law * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(law) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counts_of(runs, sample):
    generator = torch.Generator().manual_seed(11)
    counts = torch.zeros(VOCAB**2, dtype=torch.float64)
    for _ in range(runs):
        first, second = sample(generator).output_token_ids[0, :2].tolist()
        counts[VOCAB * first + second] += 1
    return counts


def test_speculative_text_has_the_target_law(four_tokens):
    counts = counts_of(
        amount(400, 1000),
        lambda generator: generate(
            *four_tokens,
            PROMPT,
            policy="speculative",
            num_draft_tokens=2,
            max_new_tokens=3,
            generator=generator,
            meter=False,
        ),
    )
    assert p_value(counts, two_token_law(four_tokens[0])) > FALSE_ALARM
    assert p_value(counts, two_token_law(four_tokens[1])) < 1e-9  # the test has power


def test_plain_text_has_the_target_law(four_tokens):
    counts = counts_of(
        amount(200, 400),
        lambda generator: generate_plain(
            four_tokens[0], PROMPT, max_new_tokens=2, generator=generator
        ),
    )
    assert p_value(counts, two_token_law(four_tokens[0])) > FALSE_ALARM


@pytest.mark.parametrize("spec", some(["cactus:delta=0.3", "band:delta=0.1"], 1))
def test_first_token_has_the_emitted_law(four_tokens, spec):
    q, p = (next_law(model) for model in four_tokens)
    law = emitted_law(policy(spec), q, p)
    pairs = counts_of(
        400,
        lambda generator: generate(
            *four_tokens,
            PROMPT,
            policy=spec,
            num_draft_tokens=1,
            max_new_tokens=2,
            generator=generator,
            meter=False,
        ),
    )
    counts = pairs.reshape(VOCAB, VOCAB).sum(-1)
    assert p_value(counts, law) > FALSE_ALARM
    assert p_value(counts, q) < 1e-6
