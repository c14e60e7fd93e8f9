"""Whole texts with a head that scores 3 of 5 tokens, against their enumerated law."""

import pytest
import torch
from safetensors.torch import save_file

import cactus_theory as ct
from cactus_theory.decoding import generate
from tests.amounts import amount, some
from tests.counts import p_value
from tests.decoding.test_eagle3 import KEPT, drafter_in, plain_logits, states_of, targets, write
from tests.markov.pair import Setting, TinyPair
from tests.markov.rounds import drafted_rounds

__all__ = ["targets"]  # a fixture
VOCAB, LENGTH, PLACES, PROMPT = 5, 4, 2, [1, 0]
FALSE_ALARM = 1e-6  # of one chi-square, if its seeds were drawn afresh
CLOSE = 1e-9  # of sums of float64 probabilities


@pytest.fixture(scope="module")
def small(targets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    weights = write(folder, VOCAB, KEPT, 3)
    weights["lm_head.weight"] = weights["lm_head.weight"] / 4
    save_file(weights, folder / "model.safetensors")
    return targets[VOCAB], folder, weights


def texts_of(length):
    """Return all texts (V^length, length), the first token slowest."""
    places = VOCAB ** torch.arange(length - 1, -1, -1)
    return torch.arange(VOCAB**length)[:, None] // places % VOCAB


def after_prompt(texts):
    return torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)


def rows_along(target, texts):
    """Return the target's probability of each text."""
    with torch.inference_mode():
        rows = target(after_prompt(texts), use_cache=False).logits.double().softmax(-1)[:, 1:-1]
    return rows.gather(-1, texts[..., None])[..., 0].prod(-1)


def tree(target, weights, text, width):
    """Return the rows of both models after a settled text and up to ``width`` drafted tokens."""
    target_rows, draft_rows = [], []
    embedding = weights["embed_tokens.weight"].double()
    settled = states_of(target, torch.tensor([text[:-1]]))
    for depth in range(width + 1):
        paths = texts_of(depth)
        ids = torch.cat([torch.tensor(text).expand(len(paths), -1), paths], 1).long()
        with torch.inference_mode():
            target_rows.append(target(ids, use_cache=False).logits[:, -1].double().softmax(-1))
        states = [layer.expand(len(ids), -1, -1) for layer in settled]
        p = torch.zeros(len(ids), VOCAB).double()
        p[:, KEPT] = plain_logits(weights, embedding, states, ids, True).softmax(-1)
        draft_rows.append(p)
    count = sum(map(len, target_rows))
    children = 1 + torch.arange(count * VOCAB).reshape(count, VOCAB)
    following = torch.where(children < count, children, 0)
    return TinyPair(torch.cat(target_rows), torch.cat(draft_rows), following)


def exact_law(target, weights, spec, verifier):
    """Return the law (V^T,) of texts: all rounds enumerated; the first round drafts nothing."""
    setting = Setting(spec, PLACES, LENGTH, verifier)
    laws = {0: torch.ones(1, dtype=torch.float64)}
    for written in range(LENGTH):
        width = min(PLACES, LENGTH - written - 1) if written else 0
        for number, settled in enumerate(texts_of(written).tolist()):
            pair = tree(target, weights, PROMPT + settled, width)
            judge = setting.policies, setting.judge
            ends = [pair.target[:1]]
            if width:
                rounds = drafted_rounds(pair, torch.tensor([0]), width, *judge)
                ends = rounds.ends
                if verifier == "chain":
                    stated = ct.emitted_law(ct.policy(spec), pair.target[0], pair.draft[0])
                    assert (stated - rounds.following[0][0, 0]).abs().max() < CLOSE
            for more, law in enumerate(ends, 1):
                known = laws.setdefault(
                    written + more, torch.zeros(VOCAB ** (written + more), dtype=torch.float64)
                )
                start = number * VOCAB**more
                known[start : start + VOCAB**more] += laws[written][number] * law[0]
    return laws[LENGTH]


SPECS = ("speculative", "band:price=0.7")
CASES = [(spec, judge) for judge in ("chain", "block") for spec in SPECS]


@pytest.mark.parametrize(("spec", "verifier"), some(CASES, 2))
def test_texts_of_three_tokens_of_five_have_the_enumerated_law(small, spec, verifier):
    target, folder, weights = small
    law = exact_law(target, weights, spec, verifier)
    own = rows_along(target, texts_of(LENGTH))
    assert law.sum() == pytest.approx(1, abs=CLOSE)
    assert ((law - own).abs().max() < CLOSE) == (spec == "speculative")
    decodes = amount(2000, 20000)
    result = generate(
        target, drafter_in(folder), torch.tensor([PROMPT]).expand(decodes, -1), policy=spec,
        verifier=verifier, num_draft_tokens=PLACES, max_new_tokens=LENGTH, eos_token_ids=(),
        seed=decodes,
    )  # fmt: skip
    numbers = (result.output_token_ids * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    assert p_value(torch.bincount(numbers, minlength=len(law)), law) > FALSE_ALARM
