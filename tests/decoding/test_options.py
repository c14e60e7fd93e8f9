"""The keywords of a decode as one object: checked once, the same in every entry."""

import inspect
import json
from dataclasses import MISSING, FrozenInstanceError, fields, replace

import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import (
    ByPosition,
    DecodeOptions,
    decode,
    generate,
    speculative_generate,
)
from cactus_theory.tuned import TunedSetting

FIELDS = {own.name: own.default for own in fields(DecodeOptions)}
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def keywords(function):
    """Return the keyword-only parameters with their defaults."""
    every = inspect.signature(function).parameters.values()
    return {own.name: own.default for own in every if own.kind is own.KEYWORD_ONLY}


def test_the_options_are_the_keywords():
    own = keywords(generate)
    required = own.pop("max_new_tokens"), FIELDS["max_new_tokens"]
    assert required == (inspect.Parameter.empty, MISSING)
    assert own == {name: default for name, default in FIELDS.items() if name in own}
    assert own.keys() | {"max_new_tokens"} == FIELDS.keys() and len(FIELDS) <= 18
    more = {"draft_model", "text_streamer", "stop_strings", "text_tokenizer"}
    assert keywords(speculative_generate).keys() - FIELDS.keys() == more


def test_specs_are_read_once():
    band, late = ct.policy("band:price=1"), ByPosition([(0, "speculative")])
    options = DecodeOptions(policy=[band, late, "typical"], max_new_tokens=4, verifier="chain")
    assert options.policies[0] is band and options.policies[1] is late
    assert options.policies[2].spec == ct.policy("typical").spec
    assert options.parsed_verifier.spec == "chain" and options.metered.spec == "kl"
    assert replace(options, meter=False).metered is None
    with pytest.raises(FrozenInstanceError):
        options.seed = 3


def test_ids_that_end_a_text_may_come_from_an_iterator():
    options = replace(DecodeOptions(max_new_tokens=4, eos_token_ids=iter([3, 5])), seed=2)
    assert options.eos_token_ids == {3, 5}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"policy": "nope"}, "policy: must be one of .* got 'nope'"),
        ({"policy": 3}, "policy: must be a spec, a Policy or a Schedule; got 3"),
        ({"policy": "typical", "verifier": "block"}, "typical has not: write it as"),
        ({"verifier": "block:runs=chain"}, "block takes no options; got 'runs'"),
        ({"temperature": -1.0}, "temperature: .* got -1.0"),
        ({"temperature": float("nan")}, "temperature: .* got nan"),
        ({"temperature": float("inf")}, "temperature: must be finite; got inf"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: must be an integer of at least 1; got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer of at least 1; got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: must be an integer .* got 2.5"),
        ({"eos_token_ids": [1, -2]}, "eos_token_ids: .* got -2"),
        ({"seed": [1, -1]}, "seed: must be an integer of at least 0; got -1"),
        ({"meter": "nope"}, "'nope'"),
        ({"meter": False, "log_probs": True}, "log_probs: needs the meter"),
        ({"callbacks": print}, "callbacks: must be a Callbacks object; got <built-in"),
        ({"device_loop": "x"}, "device_loop: must be one of True, False, None, 'torch'"),
        ({"device_loop": 1}, "device_loop: must be one of True, False, None, 'torch'"),
    ],
)
def test_what_is_wrong_is_found_when_they_are_made(tiny, wrong, said):
    with pytest.raises((ValueError, TypeError), match=said) as found:
        DecodeOptions(**{"max_new_tokens": 4} | wrong)
    with pytest.raises(type(found.value)) as again:
        generate(*tiny, IDS, **{"policy": "speculative", "max_new_tokens": 4} | wrong)
    assert str(again.value) == str(found.value)


def test_one_object_decodes_with_a_draft_and_without(tiny):
    options = DecodeOptions(max_new_tokens=6, seed=3, log_probs=True, record_rows=True)
    drafted = decode(*tiny, IDS, options)
    same = generate(*tiny, IDS, max_new_tokens=6, seed=3)
    assert drafted.output_token_ids.equal(same.output_token_ids)
    plain = decode(tiny[0], None, IDS, options)
    assert plain.reading.emitted_divergence is plain.log_probs is None and plain.rows == ()
    assert plain.target_calls == 6


PROMPT = torch.tensor([[1, 5, 9, 5]])
FEW = {"policy": "speculative", "max_new_tokens": 4}


def test_results_tell_their_dtype(tiny, make_model):
    assert generate(*tiny, PROMPT, **FEW).dtype == "float64"
    assert generate(tiny[0], None, PROMPT, max_new_tokens=2).dtype == "float64"
    single = make_model(dtype=torch.float32)
    assert generate(single, tiny[0], PROMPT, **FEW).dtype == "float32, float64"


def test_probabilities_instead_of_logits_are_named_once(tiny):
    def softmax(ids, scores):
        return scores.softmax(-1)

    with pytest.warns(UserWarning, match="logits_processor: holds probabilities") as caught:
        generate(*tiny, PROMPT, logits_processor=[softmax], **FEW)
    assert len(caught) == 1


def test_a_tuned_file_tells_the_dtype_if_it_knows_it(tmp_path):
    for about, expected in (({}, None), ({"dtype": "float32"}, "float32")):
        content = {
            "format": "cactus-theory tuned",
            "version": 2,
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
    cold, greedy = (generate(*tiny, PROMPT, temperature=own, **FEW) for own in (temperature, 0))
    assert cold.output_token_ids.equal(greedy.output_token_ids)
    hot = generate(*tiny, PROMPT, temperature=1e300, **FEW)
    assert hot.num_tokens == 4


@pytest.mark.parametrize("stop", [lambda ids: False, "x"])
def test_a_stop_that_cannot_be_called_is_refused_before_any_work(stop):
    rule = "stop: must be a callable of a row's ids and the prompt's length; got"
    with pytest.raises(TypeError, match=rule):
        ct.generate(None, None, torch.tensor([[1]]), max_new_tokens=2, stop=stop)
    DecodeOptions(max_new_tokens=2, stop=lambda ids, start: False)
