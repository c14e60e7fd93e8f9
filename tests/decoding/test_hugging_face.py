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


def both(tiny, **options):
    """Return the library's own output and ours for the same arguments."""
    target, draft = tiny
    given = {"input_ids": IDS, "attention_mask": MASK} | GREEDY | options
    plain = target.generate(**given)
    ours = target.generate(
        **given,
        custom_generate=speculative_generate,
        draft_model=draft,
        policy="speculative",
        num_draft_tokens=4,
    )
    return plain, ours


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5},
        {"bad_words_ids": [[3], [4, 9], [15, 2]]},
        {"min_new_tokens": 6, "eos_token_id": [7, 13, 15]},
        {"eos_token_id": [7, 13, 15]},
        {"eos_token_id": 15, "repetition_penalty": 1.2, "suppress_tokens": [2, 11]},
        {"max_new_tokens": 1},
        {"max_length": 12, "max_new_tokens": None},
        {"forced_eos_token_id": 5},
        {"no_repeat_ngram_size": 2},  # padding counts as text
    ],
    ids=str,
)
def test_greedy_batches_equal_the_librarys(tiny, options):
    plain, ours = both(tiny, **options)
    assert ours.tolist() == plain.tolist()


class StopAt(transformers.StoppingCriteria):
    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **given):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_stopping_criteria_are_asked_after_every_token(tiny):
    criteria = transformers.StoppingCriteriaList([StopAt([15, 7])])
    plain, ours = both(tiny, stopping_criteria=criteria)
    assert ours.tolist() == plain.tolist()
    unstopped, _ = both(tiny)
    assert plain.tolist() != unstopped.tolist()


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


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 1e-4}, {"top_p": 1e-6}])
def test_sampling_warpers_reach_both_models(tiny, options):
    """Each of these leaves one token, the greedy one."""
    plain, _ = both(tiny, max_new_tokens=9)
    output = sampled(tiny, **options, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert output.result.num_accepted > 5


def test_a_dictionary_holds_the_statistics(tiny):
    output = sampled(
        tiny, return_dict_in_generate=True, policy="cactus:delta=0.5", meter=True, seed=1
    )
    assert output.sequences.tolist() == output["sequences"].tolist()
    assert output.result.reading.emitted_divergence > 0
    assert 7 * 4 < output.result.num_tokens <= 7 * 9
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": None}, "draft_model: must be a causal LM or a drafter .*; got None"),
        ({"num_beams": 2}, "num_beams: must be 1 for speculative decoding .*; got 2"),
        ({"guidance_scale": 1.5}, "guidance_scale: must be 1 .*; got 1.5"),
        (
            {"output_scores": True, "return_dict_in_generate": True},
            r"output_scores: must be False for .* \(generate takes it without .*\); got True",
        ),
    ],
)
def test_refuses_what_it_cannot_honour(tiny, options, message):
    target, draft = tiny
    given = {"custom_generate": speculative_generate, "draft_model": draft, "pad_token_id": 6}
    with pytest.raises(ValueError, match=message):
        target.generate(IDS[2:3], max_new_tokens=4, **given | options)


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


@pytest.mark.parametrize(
    ("option", "ours"),
    [("prompt_lookup_num_tokens", r"NGram\(\)"), ("assistant_early_exit", r"EarlyExit\(layers\)")],
)
def test_drafts_of_the_library_are_named_as_ours(tiny, option, ours):
    with pytest.raises(ValueError, match=rf"{option}: must be .*here it is draft_model={ours}"):
        tiny[0].generate(IDS[2:3], max_new_tokens=4, custom_generate=speculative_generate,
                         pad_token_id=6, **{option: 2})  # fmt: skip


def test_a_policy_that_relaxes_nothing_without_sampling_says_so(tiny, recwarn):
    given = GREEDY | {"input_ids": IDS[2:3], "custom_generate": speculative_generate}
    for policy in ("speculative", "mixture:alpha=0.5,support=free"):
        tiny[0].generate(**given, draft_model=tiny[1], policy=policy)
    assert not recwarn
    with pytest.warns(UserWarning, match="do_sample: it is False, so that band:price=1.0 relaxes"):
        tiny[0].generate(**given, draft_model=tiny[1], policy="band:price=1")
