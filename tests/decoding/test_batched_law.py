"""Sampled batches have the law they claim: one seeded chi-square each, 1e-6 false alarms.

A batch of rows with seeds of their own is a sample of independent texts.
"""

import pytest
import torch
import transformers

from cactus_theory.decoding import (
    Cascade,
    EarlyExit,
    ModelDrafter,
    NGram,
    generate,
    generate_plain,
)
from cactus_theory.emitted import emitted_law
from cactus_theory.policies import policy
from cactus_theory.policies._records import Path
from tests.amounts import amount, some

VOCAB = 4
FALSE_ALARM = 1e-6  # per test, if the seed were drawn afresh
ROWS = amount(1500, 3000)
BLOCK_ROWS = amount(1000, ROWS)
PROMPT = [1, 0, 1, 2, 1]  # its last token came up before: an n-gram drafter has something to say


@pytest.fixture(scope="module")
def four_tokens(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=2, pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)
    return target, make_draft(target, noise=0.5, seed=4)


def top_p(share):
    return [transformers.TopPLogitsWarper(share)]


def next_law(model, *tokens, warpers=()):
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
    for warper in warpers:
        logits = warper(ids, logits)
    return logits[0].softmax(-1)


def two_token_law(model, warpers=()):
    first = next_law(model, warpers=warpers)
    return torch.cat([first[x] * next_law(model, x, warpers=warpers) for x in range(VOCAB)])


def counts_of(target, draft, seed=0, rows=ROWS, **options):
    ids = torch.tensor([PROMPT]).expand(rows, -1)
    given = {"max_new_tokens": 3, "num_draft_tokens": 2, "meter": False} | options
    texts = generate(target, draft, ids, seed=ROWS * seed, **given).output_token_ids
    pairs = VOCAB * texts[:, 0] + texts[:, 1]
    return pairs.bincount(minlength=VOCAB**2).double()


def p_value(counts, law):
    possible = law > 0
    assert counts[~possible].sum() == 0
    expected = law[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = (possible.sum() - 1).double() / 2
    return float(torch.special.gammaincc(freedom, statistic / 2))


DRAFTERS = {
    "model": lambda model: model,
    "greedy": lambda model: ModelDrafter(model, greedy=True),
    "stopped": lambda model: ModelDrafter(model, stop=0.65),
    "ngram": lambda model: NGram(),
    "early exit": lambda model: EarlyExit(1),
    "cascade": lambda model: Cascade(ModelDrafter(model), NGram(3, 2)),
}


BY = [(name, "chain") for name in DRAFTERS] + [(name, "block") for name in some(DRAFTERS, 2)]


@pytest.mark.parametrize(("name", "verifier"), BY)
def test_lossless_texts_have_the_target_law(four_tokens, name, verifier):
    target, model = four_tokens
    drafter = DRAFTERS[name](model)
    rows = ROWS if verifier == "chain" else BLOCK_ROWS
    counts = counts_of(target, drafter, seed=1, rows=rows, policy="speculative", verifier=verifier)
    assert p_value(counts, two_token_law(target)) > FALSE_ALARM
    assert p_value(counts, two_token_law(model)) < 1e-9  # the test has power


def test_stopped_blocks_have_the_target_law(four_tokens):
    target, model = four_tokens
    drafter = ModelDrafter(model, stop=0.5)
    options = {"verifier": "block", "num_draft_tokens": 4, "max_new_tokens": 5}
    counts = counts_of(target, drafter, seed=8, policy="speculative", **options)
    assert p_value(counts, two_token_law(target)) > FALSE_ALARM


def test_masked_drafts_have_the_masked_target_law(four_tokens):
    target, model = four_tokens
    options = {"policy": "speculative", "logits_processor": top_p(0.8)}
    counts = counts_of(target, model, seed=2, **options)
    law = two_token_law(target, top_p(0.8))
    assert p_value(counts, law) > FALSE_ALARM
    assert (law == 0).any() and (two_token_law(model, top_p(0.8)) == 0).any()


@pytest.mark.parametrize("spec", ["cactus:delta=0.3", "band:delta=0.1"])
@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_has_the_emitted_law(four_tokens, spec, certain):
    target, model = four_tokens
    q, p = (next_law(one) for one in four_tokens)
    if certain:
        p = torch.zeros(VOCAB, dtype=q.dtype).scatter(0, p.argmax()[None], 1.0)
    law = emitted_law(policy(spec), q, p)
    drafter = ModelDrafter(model, greedy=certain)
    counts = counts_of(target, drafter, seed=3, policy=spec).reshape(VOCAB, VOCAB).sum(-1)
    assert p_value(counts, law) > FALSE_ALARM
    assert p_value(counts, q) < 1e-6


@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_of_a_block_has_the_policys_law(four_tokens, certain):
    """P is 1 there, and one more drafted token follows."""
    target, model = four_tokens
    q, p = (next_law(one) for one in four_tokens)
    if certain:
        p = torch.zeros(VOCAB, dtype=q.dtype).scatter(0, p.argmax()[None], 1.0)
    at = Path(torch.ones((), dtype=torch.float64), torch.tensor(1))
    law = policy("soft_band:price=0.5").target_in_block(q, p, at)
    spec = "soft_band:price=0.5,ahead=false" if certain else "soft_band:price=0.5"
    drafter = ModelDrafter(model, greedy=certain)
    options = {"rows": BLOCK_ROWS, "policy": spec, "verifier": "block"}
    counts = counts_of(target, drafter, seed=3, **options).reshape(VOCAB, VOCAB).sum(-1)
    assert p_value(counts, law) > FALSE_ALARM
    assert p_value(counts, q) < 1e-6


def test_plain_texts_have_the_target_law(four_tokens):
    ids = torch.tensor([PROMPT]).expand(ROWS, -1)
    texts = generate_plain(four_tokens[0], ids, max_new_tokens=2, seed=7).output_token_ids
    pairs = (VOCAB * texts[:, 0] + texts[:, 1]).bincount(minlength=VOCAB**2).double()
    assert p_value(pairs, two_token_law(four_tokens[0])) > FALSE_ALARM
