"""Every causal-LM family decodes what its own greedy search writes, or is refused in words."""

import warnings

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding.models.cache_check import runs_together
from cactus_theory.decoding.models.model_with_cache import check_positions
from tests.amounts import thorough
from tests.decoding.models.families import build, families, own_greedy, small_config

NEW = 12
IDS = torch.tensor([[5, 9, 11, 7, 9, 11, 8], [0, 0, 0, 0, 6, 12, 4]])  # prompts of 7 and 3 ids
MASK = torch.tensor([[1] * 7, [0, 0, 0, 0, 1, 1, 1]])
FAMILIES = families()

# in one call for rows of different lengths, by what they need: plain masks, a window in all
# layers or in some, positions learned or turned, experts, keys wider than values
TOGETHER = ("LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM")
TOGETHER += ("MistralForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM")
TOGETHER += ("DeepseekV3ForCausalLM", "Phi3ForCausalLM", "FalconForCausalLM", "GptOssForCausalLM")
ONE_TEXT = ("BloomForCausalLM", "BartForCausalLM")
REFUSED = {
    "RobertaForCausalLM": "must equal whole ones; in RobertaForCausalLM they differ by",
    "OpenAIGPTLMHeadModel": "must equal whole ones; in OpenAIGPTLMHeadModel they differ by",
    "XLMWithLMHeadModel": "in XLMWithLMHeadModel prepare_inputs_for_generation adds langs",
    "CpmAntForCausalLM": "in CpmAntForCausalLM the cache fails",
    "MoshiForCausalLM": "stay within its sliding window of 7, which its forward pass does not",
    "Llama4ForCausalLM": "every layer must be one of .* got 'chunked_attention'",
}
KNOWN = (*TOGETHER, *ONE_TEXT, *REFUSED)
OTHERS = [name for name in FAMILIES if name not in KNOWN]


def built(name):
    if name not in FAMILIES:
        pytest.skip("this transformers has no such family")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build(*FAMILIES[name])
    except Exception as error:
        if name in KNOWN:
            raise
        pytest.skip(f"no small model: {type(error).__name__}")


def theirs(model, name):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return own_greedy(model, [IDS[0], IDS[1, 4:]], NEW)
    except Exception as error:
        if name in KNOWN and name not in REFUSED:
            raise
        return f"its own generate fails: {type(error).__name__}"


def check_decides(name):
    """Return the family's model once its texts are the library's, None if it is refused."""
    model = built(name)
    own = theirs(model, name)
    try:
        ours = generate(
            model, None, IDS, attention_mask=MASK, max_new_tokens=NEW, temperature=0.0
        ).output_token_ids.tolist()
    except ValueError as refusal:
        assert str(refusal).startswith("model: ")
        assert type(model).__name__ in str(refusal)
        assert "\n" not in str(refusal)
        return None
    if isinstance(own, str):
        pytest.skip(own)
    assert ours == own
    return model


@pytest.mark.parametrize("name", TOGETHER)
def test_families_run_ragged_batches_in_one_call_if_they_take_our_masks(name):
    model = check_decides(name)
    assert model is not None and runs_together(model)


@pytest.mark.parametrize("name", ONE_TEXT)
def test_families_that_take_no_masks_of_ours_decode_one_text(name):
    assert check_decides(name) is None
    model = built(name)
    for text, own in zip((IDS[:1], IDS[1:, 4:]), theirs(model, name), strict=True):
        ours = generate(model, None, text, max_new_tokens=NEW, temperature=0.0)
        assert ours.output_token_ids[0].tolist() == own


@pytest.mark.parametrize("name", REFUSED)
def test_families_whose_cache_differs_are_refused_in_words(name):
    model = built(name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        generate(model, None, IDS, attention_mask=MASK, max_new_tokens=NEW, temperature=0.0)


@thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)  # a minute
def test_no_family_differs_in_silence(name):
    check_decides(name)


def test_a_rotary_table_that_changes_with_the_text_it():
    config, model_class = FAMILIES["Phi3ForCausalLM"]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 6.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    given = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    model = build(config, model_class, sliding_window=None, **given)
    options = {"max_new_tokens": 9, "temperature": 0.0}
    ours = generate(model, None, IDS[:1], **options).output_token_ids.tolist()
    assert ours == own_greedy(model, IDS[:1], 9)
    with pytest.raises(ValueError, match="Phi3ForCausalLM must stay within 16 positions"):
        generate(model, None, IDS[:1], **(options | {"max_new_tokens": 10}))


def test_the_trial_is_made_once_per_model(monkeypatch):
    model = build(*FAMILIES["GPT2LMHeadModel"])
    calls = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    for _ in range(3):
        runs_together(model)
    assert 0 < len(calls) <= 8  # of at most 8 tokens each


def test_a_window_of_the_family_s_own_is_not_trusted_to_masks():
    config = small_config(FAMILIES["GPT2LMHeadModel"][0])
    model = build(*FAMILIES["GPT2LMHeadModel"])
    assert runs_together(model)
    config.window_size = 5
    other = FAMILIES["GPT2LMHeadModel"][1](config).eval()
    assert not runs_together(other)
    check_positions(other, 96)
