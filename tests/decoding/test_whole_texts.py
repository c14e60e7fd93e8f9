"""Whole texts, calls and meter of seeded decodes, against their exact law.

The rows of two tiny real models after every prefix make a pair whose texts are enumerated
(``tests.markov``) for any policy and verifier, with the draft lengths of the loop.
"""

import math

import pytest
import torch

from cactus_theory.decoding import generate
from tests.amounts import amount, some
from tests.counts import p_value
from tests.markov.pair import Setting, TinyPair
from tests.markov.texts import enumerate_texts

PROMPT = [1, 0]
VOCAB, LENGTH, END = 3, 5, 2
DECODES = amount(600, 4000)
FALSE_ALARM = 1e-6  # of one chi-square, if its seeds were drawn afresh
SIGMAS = 5.0  # of a mean, either side: as rare, 6e-7 where it is normal
ROUNDING = 1e-9  # of numbers that are the same in every decode
# four of them, evenly spread, run in the plain suite
CASES = [
    ("band:price=1", "block", 2, None),
    ("speculative", "chain", 2, END),
    ("cactus:delta=0.2", "block", 2, None),
    ("lenience:lenience=0.5", "block", 3, END),
    ("mixture:alpha=0.5", "block", 4, None),
    ("band:delta=0.1", "chain", 2, None),
    ("typical:epsilon=0.3", "chain", 3, None),
    ("cactus:delta=0.2", "chain", 2, END),
    ("cactus:delta=0.2", "chain", 3, None),
    ("lenience:lenience=0.5", "chain", 4, END),
    ("mixture:alpha=0.5", "chain", 1, None),
    ("band:delta=0.1", "block", 3, END),
    ("band:price=1", "chain", 4, None),
    ("band:price=1", "block", 3, None),  # its rows depend on the path to them
    ("speculative", "chain", 4, None),
    ("band:price=0.7", "block", 2, END),
    ("speculative", "block", 4, None),
]


@pytest.fixture(scope="module")
def models(make_model, make_draft):
    target = make_model(vocab=VOCAB, layers=1, pad_token_id=None, bos_token_id=1, eos_token_id=END)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.2)
    return target, make_draft(target, noise=2.0, seed=5)


@pytest.fixture(scope="module")
def pair(models):
    return every_prefix(*models, PROMPT, LENGTH)


def every_prefix(target, draft, prompt, length):
    """Return the models as a pair with a state for every text of up to length − 1 tokens."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * (length - 1))
    ids = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
    rows = []
    for model in (target, draft):
        with torch.inference_mode():
            probs = model(input_ids=ids, use_cache=False).logits.double().softmax(-1)
        after = probs[:, len(prompt) - 1 :]
        rows.append(torch.cat([after[:: VOCAB ** (length - 1 - t), t] for t in range(length)]))
    count = len(rows[0])
    children = 1 + torch.arange(count * VOCAB).reshape(count, VOCAB)
    return TinyPair(*rows, following=torch.where(children < count, children, 0))


def decodes(models, spec, verifier, width, end, seed, **options):
    return generate(
        *models,
        torch.tensor([PROMPT]).expand(DECODES, -1),
        policy=spec,
        verifier=verifier,
        num_draft_tokens=width,
        max_new_tokens=LENGTH,
        eos_token_ids=() if end is None else end,
        seed=DECODES * seed,
        **options,
    )


def counts_of(result, law):
    """Return how often each text came, laid out as ``Texts.law``."""
    counts = [torch.zeros_like(part) for part in law]
    for text in result.output_token_ids.tolist():
        own = [token for token in text if token >= 0]
        counts[len(own)][sum(t * VOCAB**i for i, t in enumerate(reversed(own)))] += 1
    return torch.cat(counts)


def check_mean(seen, expected, deviation):
    assert abs(seen - expected) <= SIGMAS * deviation / math.sqrt(DECODES) + ROUNDING


@pytest.mark.parametrize(("spec", "verifier", "width", "end"), some(CASES, 4))
def test_decodes_have_the_enumerated_law(models, pair, spec, verifier, width, end):
    exact = enumerate_texts(pair, Setting(spec, width, LENGTH, verifier, end))
    seed = CASES.index((spec, verifier, width, end))
    result = decodes(models, spec, verifier, width, end, seed)
    counts = counts_of(result, exact.law)
    law, target = torch.cat(exact.law), torch.cat(exact.target)
    assert p_value(counts, law) > FALSE_ALARM
    ratio = torch.where(law > 0, law / target, 1.0).log()  # its mean is the KL of the text
    deviation = float((law @ ratio**2 - exact.kl**2).clamp(min=0).sqrt())
    check_mean(float(counts @ ratio) / DECODES, exact.kl, deviation)
    if spec != "speculative":  # so far from what the target's own texts would give, at most 0
        assert exact.kl > SIGMAS * deviation / math.sqrt(DECODES)
    check_mean(result.reading.num_calls / DECODES, exact.calls.mean, exact.calls.deviation)
    check_mean(result.reading.emitted_divergence / DECODES, exact.meter.mean, exact.meter.deviation)
    check_mean(result.num_tokens / DECODES, exact.tokens, spread(exact.law))


def test_the_count_of_calls_tells_the_verifiers_apart(pair):
    """At K = 4 the lossless calls of the two differ by more than the test lets pass."""
    chain, block = (
        enumerate_texts(pair, Setting("speculative", 4, LENGTH, verifier)).calls
        for verifier in ("chain", "block")
    )
    passes = SIGMAS * max(chain.deviation, block.deviation) / math.sqrt(DECODES)
    assert chain.mean - block.mean > passes


def spread(law):
    """Return the standard deviation of a text's length."""
    length = [t * float(part.sum()) for t, part in enumerate(law)]
    square = [t * own for t, own in enumerate(length)]
    return math.sqrt(max(sum(square) - sum(length) ** 2, 0.0))
