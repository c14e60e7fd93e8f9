"""Drafters say what they promise, and are refused where they cannot work."""

import copy

import pytest
import torch

from cactus_theory.decoding import EarlyExit, NGram, generate, read_drafter
from cactus_theory.decoding._text import Texts
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


def test_an_ngram_decode_makes_no_draft_calls(tiny):
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    result = generate(tiny[0], NGram(), ids, policy="cactus:delta=1", max_new_tokens=30)
    assert result.draft_calls == 0
    assert result.num_accepted > 0
    assert {drafted for drafted, _, _ in result.reading.rounds} > {0, 4}  # as much as was found
    told = result.statistics()
    assert 0 < told["num_drafts"] < told["num_calls"] == told["target_calls"]
    assert told["tokens_per_call"] == told["tokens"] / told["num_calls"]


def test_an_early_exit_shares_the_weights_and_leaves_the_target_alone(make_model):
    target = make_model(layers=3)
    short = EarlyExit(2).of(target)
    assert len(short.model.layers) == 2 and len(target.model.layers) == 3
    assert short.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 3
    assert short.lm_head.weight is target.lm_head.weight
    with torch.inference_mode():
        hidden = target(input_ids=PROMPT, output_hidden_states=True).hidden_states[2]
        expected = target.lm_head(target.model.norm(hidden))
        assert torch.allclose(short(input_ids=PROMPT).logits, expected)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["skip:2", "4bit"])
def test_a_copy_of_the_targets_weights_drafts_by_its_own_law(make_model, name, fast):
    """A second model with those weights drafts the same, and the target is left alone."""
    target, by_hand = make_model(layers=6), make_model(layers=6)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    if name == "4bit":
        for layer in by_hand.model.layers:
            for weight in layer.parameters():
                if weight.dim() == 2:
                    for part in weight.data.split(32, 1):  # of 48 inputs the second is shorter
                        scale = part.abs().amax(1, keepdim=True) / 7
                        part.copy_((part / scale).round().clamp(-7, 7) * scale)
    else:  # of six layers the third and the fifth
        by_hand = make_model(layers=4)
        for place, kept in enumerate((0, 1, 3, 5)):
            by_hand.model.layers[place].load_state_dict(target.model.layers[kept].state_dict())
        for part in ("embed_tokens", "norm"):
            own = getattr(target.model, part).state_dict()
            getattr(by_hand.model, part).load_state_dict(own)
        by_hand.lm_head.load_state_dict(target.lm_head.state_dict())
    options = {"policy": "speculative", "max_new_tokens": 24, "fast_forward": fast}
    ours, theirs = (generate(target, draft, PROMPT, seed=3, **options) for draft in (name, by_hand))
    assert ours.output_token_ids.tolist() == theirs.output_token_ids.tolist()
    assert ours.num_accepted == theirs.num_accepted > 0
    assert all(torch.equal(before[key], own) for key, own in target.state_dict().items())


def test_weights_of_another_kind_are_not_rounded(tiny):
    packed = copy.deepcopy(tiny[0])
    for layer in packed.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in [name for name, child in part.named_children() if name != "act_fn"]:
                setattr(part, name, torch.nn.Identity())
    with pytest.raises(ValueError, match="must have linear layers of torch .*; got Llama"):
        read_drafter("4bit").check(packed)
