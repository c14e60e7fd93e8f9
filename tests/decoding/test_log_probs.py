"""ln q and ln h of every new token, side by side."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import ModelDrafter, generate
from tests.amounts import amount, some
from tests.decoding.test_ragged import padded, prompts

# float64 models; the library's norms are float32 whatever the model is
CLOSE = 1e-5
ROUNDING = 1e-10
OPTIONS = {"max_new_tokens": 25, "num_draft_tokens": 5, "eos_token_ids": (7, 13, 15)}
POLICIES = ["cactus:delta=0.4", "band:price=0.7", "soft_band:price=0.7"]


def decode(tiny, policy, verifier="block", trial=0, **options):
    ids, mask = padded(prompts(seed=trial))
    given = {"policy": policy, "verifier": verifier, "seed": trial, "log_probs": True} | OPTIONS
    return ids, mask, generate(*tiny, ids, attention_mask=mask, **(given | options))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ln_q_is_what_the_target_gives_the_text(tiny, temperature):
    ids, mask, result = decode(tiny, "cactus:delta=0.4", "chain", temperature=temperature)
    assert len(set(result.row_lengths)) > 3
    for row, length in enumerate(result.row_lengths):
        prompt, new = ids[row][mask[row].bool()], result.output_token_ids[row, :length]
        text = torch.cat([prompt, new])[None]
        with torch.inference_mode():
            full = (tiny[0](input_ids=text).logits[0] / temperature).log_softmax(-1)
        expected = full[len(prompt) - 1 : -1].gather(-1, new[:, None])[:, 0]
        assert torch.allclose(result.log_probs.target[row, :length], expected, atol=CLOSE)
        assert result.log_probs.target[row, length:].isnan().all()
        assert result.log_probs.emitted[row, length:].isnan().all()


def test_ln_h_is_the_emitted_law_at_verified_rows_and_q_at_others(tiny):
    result = generate(*tiny, torch.tensor([[1, 5, 9]]), policy="cactus:delta=0.4", seed=3,
                      max_new_tokens=40, record_rows=True, log_probs=True)  # fmt: skip
    rows, found = result.rows, result.log_probs
    law = ct.emitted_law(ct.policy("cactus:delta=0.4"), rows.target_probs, rows.draft_probs)
    charged = result.token_kl[0] > 0
    spent = ct.divergence("kl").value(law, rows.target_probs)
    emitted = result.output_token_ids[0][charged]
    expected = law[spent > 0].gather(-1, emitted[:, None])[:, 0].log()
    assert torch.allclose(found.emitted[0][charged], expected, atol=ROUNDING)
    assert torch.equal(found.emitted[0][~charged], found.target[0][~charged])
    assert 5 < int(charged.sum()) < 40


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_lossless_tokens_have_one_probability(tiny, verifier):
    _, _, result = decode(tiny, "speculative", verifier)
    taken = result.output_token_ids >= 0
    assert torch.equal(result.log_probs.target[taken], result.log_probs.emitted[taken])
    assert (result.log_probs.target[taken] <= 0).all()


def test_greedy_texts_are_certain(tiny):
    _, _, result = decode(tiny, "band:price=1", temperature=0.0)
    taken = result.output_token_ids >= 0
    assert not result.log_probs.target[taken].any() and not result.log_probs.emitted[taken].any()


# with |z| < 5 a false alarm has probability 6e-7 each; seeds are fixed
Z = 5.0
CASES = [
    (policy, verifier, certain)
    for policy in POLICIES
    for verifier in ("chain", "block")
    for certain in (False, True)
    if verifier == "block" or "soft" not in policy
]


@pytest.mark.parametrize(("policy", "verifier", "certain"), some(CASES, 3))
def test_on_average_ln_h_less_ln_q_is_what_the_meter_charges(tiny, policy, verifier, certain):
    """A sum of martingale differences over many tokens: ln h − ln q − charge."""
    excess, spent = [], 0.0
    for trial in range(amount(3, 60)):
        ids, mask = padded(prompts(seed=trial))
        result = generate(
            tiny[0], ModelDrafter(tiny[1], greedy=certain), ids, attention_mask=mask,
            policy=policy, verifier=verifier, seed=trial, log_probs=True, **OPTIONS,
        )  # fmt: skip
        taken = result.output_token_ids >= 0
        gain = result.log_probs.emitted - result.log_probs.target
        excess.append((gain - result.token_kl)[taken])
        spent += float(result.token_kl.sum())
    every = torch.cat(excess)
    assert spent > 2 and len(every) > 100
    assert abs(float(every.sum())) < Z * math.sqrt(float((every**2).sum()))
    assert spent > 2 * math.sqrt(float((every**2).sum()))  # so that a charge of 0 would be seen


def test_a_charged_bonus_has_the_policys_row(tiny):
    ids = torch.tensor([[1, 5, 9]])
    options = {"policy": "band:price=0.5", "num_draft_tokens": 2, "max_new_tokens": 30, "seed": 1}
    free = generate(*tiny, ids, verifier="block", log_probs=True, **options)
    charged = generate(*tiny, ids, verifier="block:bonus=policy", log_probs=True, **options)
    same = [
        int((found.log_probs.target == found.log_probs.emitted).sum()) for found in (free, charged)
    ]
    assert same[0] > 3 > same[1]
    assert float(charged.token_kl.sum()) == pytest.approx(charged.meter.kl, abs=ROUNDING)


def test_they_need_the_meter_and_are_off_unless_asked_for(tiny):
    ids = torch.tensor([[1, 5, 9]])
    with pytest.raises(ValueError, match="log_probs: needs the meter"):
        generate(*tiny, ids, policy="speculative", max_new_tokens=4, log_probs=True, meter=False)
    assert generate(*tiny, ids, policy="speculative", max_new_tokens=4).log_probs is None
