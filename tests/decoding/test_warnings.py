"""What a decode says once, in words: precision, swapped models, probabilities for logits."""

import json

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import generate
from cactus_theory.tuned import TunedSetting

PROMPT = torch.tensor([[1, 5, 9, 5]])
OPTIONS = {"policy": "speculative", "max_new_tokens": 4}


def test_results_tell_their_dtype(tiny, make_model):
    assert generate(*tiny, PROMPT, **OPTIONS).dtype == "float64"
    assert generate(tiny[0], None, PROMPT, max_new_tokens=2).dtype == "float64"
    single = make_model(dtype=torch.float32)
    assert generate(single, tiny[0], PROMPT, **OPTIONS).dtype == "float32, float64"


def test_a_draft_larger_than_its_target_is_named(tiny, make_model):
    small = make_model(layers=1)
    with pytest.warns(UserWarning, match="draft_model: has more parameters .* swapped"):
        generate(small, tiny[0], PROMPT, **OPTIONS)


def test_probabilities_instead_of_logits_are_named_once(tiny):
    def softmax(ids, scores):
        return scores.softmax(-1)

    with pytest.warns(UserWarning, match="logits_processor: holds probabilities") as caught:
        generate(*tiny, PROMPT, logits_processor=[softmax], **OPTIONS)
    assert len(caught) == 1


def test_a_tuned_file_tells_the_dtype_if_it_knows_it(tmp_path):
    for about, expected in (({}, None), ({"dtype": "float32"}, "float32")):
        content = {
            "format": "cactus-theory tuned",
            "version": 1,
            "source": about,
            "level": 0.1,
            "divergence": "kl",
            "recommended": None,
        }
        (tmp_path / "tuned.json").write_text(json.dumps(content))
        setting = ct.load_tuned(tmp_path / "tuned.json")
        assert isinstance(setting, TunedSetting) and setting.dtype == expected


@pytest.mark.parametrize("temperature", [1e-300, 5e-324])
def test_the_coldest_decode_is_greedy(tiny, temperature):
    cold, greedy = (generate(*tiny, PROMPT, temperature=own, **OPTIONS) for own in (temperature, 0))
    assert cold.output_token_ids.equal(greedy.output_token_ids)
    hot = generate(*tiny, PROMPT, temperature=1e300, **OPTIONS)
    assert hot.num_tokens == 4
