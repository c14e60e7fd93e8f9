"""Drafters say what they promise, and are refused where they cannot work."""

import pytest
import torch

from cactus_theory.decoding import EarlyExit, ModelDrafter, NGram, generate
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters.early_exit import first_layers
from cactus_theory.decoding.drafters.ngram import NGramDrafting

PROMPT = torch.tensor([[1, 5, 9]])


def looked_up(ids, wanted=4, longest=3, shortest=1):
    texts = Texts([ids], 8, frozenset(), torch.device("cpu"))
    return NGramDrafting(texts, range(longest, shortest - 1, -1)).look_up(0, wanted)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest match
        ([5, 1, 2, 3, 9, 2, 7, 1, 2], [3, 9, 2, 7]),  # the longest match beats the latest
        ([1, 2, 3], []),
        ([4], []),
        ([4, 4], [4]),
        ([4, 4, 4], [4]),
    ],
)
def test_ngrams_repeat_what_followed(ids, found):
    assert looked_up(ids) == found


def test_ngrams_of_a_growing_text_equal_a_fresh_index():
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (60,), generator=source).tolist()
    texts = Texts([ids[:1]], 80, frozenset(), torch.device("cpu"))
    drafting = NGramDrafting(texts, range(3, 0, -1))
    for token in ids[1:]:
        texts.ids[0].append(token)
        assert drafting.look_up(0, 5) == looked_up(texts.ids[0], 5)


def test_ngrams_shorter_than_asked_for_are_not_looked_up():
    assert looked_up([1, 2, 3, 1], shortest=2) == []


def test_statistics_say_how_many_calls_had_a_draft(tiny):
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    found = generate(tiny[0], NGram(), ids, policy="speculative", max_new_tokens=30).statistics()
    assert 0 < found["num_drafts"] < found["num_calls"] == found["target_calls"]
    assert found["tokens_per_call"] == found["tokens"] / found["num_calls"]


def test_an_ngram_decode_makes_no_draft_calls(tiny):
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    result = generate(tiny[0], NGram(), ids, policy="cactus:delta=1", max_new_tokens=30)
    assert result.draft_calls == 0
    assert result.num_accepted > 0
    assert {drafted for drafted, _, _ in result.reading.rounds} > {0, 4}  # as much as was found


def test_an_early_exit_shares_the_weights_and_leaves_the_target_alone(make_model):
    target = make_model(layers=3)
    short = first_layers(target, 2)
    assert len(short.model.layers) == 2 and len(target.model.layers) == 3
    assert short.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 3
    assert short.lm_head.weight is target.lm_head.weight
    with torch.inference_mode():
        hidden = target(input_ids=PROMPT, output_hidden_states=True).hidden_states[2]
        expected = target.lm_head(target.model.norm(hidden))
        assert torch.allclose(short(input_ids=PROMPT).logits, expected)


@pytest.mark.parametrize("layers", [0, 2, True, 1.0])
def test_an_early_exit_must_leave_layers_out(tiny, layers):
    with pytest.raises(ValueError, match=r"layers: must be an integer in \[1, 2\); got"):
        generate(tiny[0], EarlyExit(layers), PROMPT, policy="speculative", max_new_tokens=4)


def test_refuses_what_cannot_draft(tiny, make_model):
    given = {"policy": "speculative", "max_new_tokens": 4}
    with pytest.raises(TypeError, match="draft_model: must be a causal LM, a Drafter or"):
        generate(tiny[0], 3, PROMPT, **given)
    with pytest.raises(ValueError, match="draft_model: must be one of .*; got 'nowhere'"):
        generate(tiny[0], "nowhere", PROMPT, **given)
    with pytest.raises(ValueError, match=r"draft_model: vocabulary .*got 12"):
        generate(tiny[0], ModelDrafter(make_model(vocab=12)), PROMPT, **given)
    with pytest.raises(ValueError, match="longest: must be an integer of at least 2; got 1"):
        NGram(longest=1, shortest=2)
