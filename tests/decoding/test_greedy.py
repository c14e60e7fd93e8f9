"""At temperature 0 speculation may change the cost of a text, never the text."""

import pytest
import torch

from cactus_theory.decoding import generate, generate_plain

POLICIES = ["speculative", "cactus:delta=0.5", "band:delta=0.2"]
PROMPTS = [[1, 5, 9], [2], [3, 3, 3, 7, 11, 4]]
STORY_STARTS = ["Once upon a time", "Tom and Lily went to the park. They saw"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_equals_plain_greedy(tiny, policy, width):
    accepted = 0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 24, "temperature": 0.0}
        plain = generate_plain(tiny[0], ids, **options)
        mixed = generate(*tiny, ids, policy=policy, num_draft_tokens=width, seed=3, **options)
        assert mixed.output_token_ids.tolist() == plain.output_token_ids.tolist()
        assert mixed.meter.kl == 0
        accepted += mixed.num_accepted
    assert 0 < accepted < 24 * len(PROMPTS)  # the draft is neither useless nor the target


@pytest.mark.parametrize("policy", ["speculative", "cactus:delta=0.5"])
def test_equals_plain_greedy_on_stories(stories, policy):
    for start in STORY_STARTS:
        ids = stories.tokenizer(start, return_tensors="pt").input_ids
        options = {"max_new_tokens": 60, "temperature": 0.0, "eos_token_ids": (1,)}
        plain = generate_plain(stories.target, ids, **options)
        mixed = generate(stories.target, stories.draft, ids, policy=policy, **options)
        assert mixed.output_token_ids.tolist() == plain.output_token_ids.tolist()
        assert mixed.num_accepted > 10


def test_plain_greedy_equals_recomputation(tiny):
    text = torch.tensor([[1, 5, 9]])
    plain = generate_plain(tiny[0], text, max_new_tokens=12, temperature=0.0)
    with torch.inference_mode():
        for _ in range(12):
            best = tiny[0](input_ids=text, use_cache=False).logits[:, -1].argmax(-1)
            text = torch.cat([text, best[None]], 1)
    assert plain.output_token_ids.tolist() == text[:, 3:].tolist()


def test_a_perfect_draft_is_always_accepted(tiny):
    result = generate(
        tiny[0],
        tiny[0],
        torch.tensor([[1, 5, 9]]),
        policy="speculative",
        num_draft_tokens=3,
        max_new_tokens=20,
    )
    assert result.accepted_histogram == (0, 0, 0, 5)
    assert result.num_tokens == 20
