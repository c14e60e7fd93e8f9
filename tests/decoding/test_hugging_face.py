"""generate(custom_generate=…) gives what generate gives without the hook, faster."""

import pytest
import torch
import transformers

import cactus_theory as ct
from cactus_theory.decoding import speculative_generate
from cactus_theory.tuned import TunedSetting
from tests.decoding.test_ragged import padded, prompts

IDS, MASK = padded(prompts(seed=9), pad=6)
GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 6, "eos_token_id": 2}


def sampled(tiny, **options):
    target, draft = tiny
    given = {"input_ids": IDS, "attention_mask": MASK, "do_sample": True, "max_new_tokens": 9}
    return target.generate(
        **given | {"pad_token_id": 6} | options,
        custom_generate=speculative_generate,
        draft_model=draft,
    )


def test_sampling_follows_the_seed_or_the_global_one(tiny):
    first, again = (sampled(tiny, seed=3).tolist() for _ in range(2))
    assert first == again != sampled(tiny, seed=4).tolist()
    texts = []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(sampled(tiny).tolist())
    assert texts[0] == texts[1]


def test_a_dictionary_holds_the_statistics(tiny):
    output = sampled(
        tiny, return_dict_in_generate=True, policy="cactus:delta=0.5", meter=True, seed=1
    )
    assert output.sequences.tolist() == output["sequences"].tolist()
    assert output.result.reading.emitted_divergence > 0
    assert 7 * 4 < output.result.num_tokens <= 7 * 9
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)


def test_a_tuned_setting_gives_its_options(tiny):
    setting = TunedSetting(ct.policy("band:price=1"), "chain", 2, 0.7)
    output = sampled(tiny, return_dict_in_generate=True, seed=1, **setting.options)
    same = sampled(tiny, policy="band:price=1", num_draft_tokens=2, temperature=0.7, seed=1)
    assert output.result.reading.rows > 0  # on without being asked for
    assert torch.equal(output.sequences, same)


def test_log_probs_switch_the_meter_on(tiny):
    asked = {"log_probs": True, "return_dict_in_generate": True, "policy": "cactus:delta=0.5"}
    result = sampled(tiny, **asked, seed=1, fast_forward=False).result
    assert result.reading.divergence == "kl"
    assert not torch.allclose(result.log_probs.target, result.log_probs.emitted, atol=1e-3)


def test_a_policy_that_relaxes_nothing_without_sampling_says_so(tiny, recwarn):
    given = GREEDY | {"input_ids": IDS[2:3], "custom_generate": speculative_generate}
    for policy in ("speculative", "mixture:alpha=0.5,support=free"):
        tiny[0].generate(**given, draft_model=tiny[1], policy=policy)
    assert not recwarn
    with pytest.warns(UserWarning, match="do_sample: it is False, so that band:price=1.0 relaxes"):
        tiny[0].generate(**given, draft_model=tiny[1], policy="band:price=1")
