"""Decodes whose drafted paths are verified as a whole: the texts, their ends, what is refused."""

import pytest
import torch

from cactus_theory.decoding import (
    Between,
    generate,
    generate_plain,
)
from tests.amounts import THOROUGH, some
from tests.decoding.test_ragged import compare, padded, prompts

PROMPT = torch.tensor([[1, 5, 9]])
POLICIES = ["speculative", "band:price=1.5", "soft_band:price=1", "cactus:delta=0.4"]
OPTIONS = {"max_new_tokens": 20, "num_draft_tokens": 4, "eos_token_ids": (7, 13, 15)}
BLOCK = {"verifier": "block"}


# by this package's own forward pass and by the library's
FORWARD = [("fast", policy) for policy in POLICIES] + [("library", POLICIES[-1])]


@pytest.mark.parametrize(("forward", "policy"), FORWARD)
def test_greedy_texts_are_the_targets(tiny, forward, policy):
    target, draft = tiny
    ids, mask = padded(prompts(seed=9)[:4])
    given = {"attention_mask": mask, "max_new_tokens": 20, "temperature": 0.0}
    given["eos_token_ids"] = (7, 13)
    plain = generate_plain(target, ids, **given)
    found = generate(
        target,
        draft,
        ids,
        policy=policy,
        num_draft_tokens=5,
        fast_forward=forward == "fast",
        **BLOCK,
        **given,
    )
    assert found.output_token_ids.tolist() == plain.output_token_ids.tolist()
    assert found.reading.emitted_divergence == 0
    assert sum(count > 0 for count in found.accepted_histogram) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_equal_each_alone(tiny, policy):
    result = compare(*tiny, prompts(), BLOCK | OPTIONS, policy)
    assert len(set(result.row_lengths)) > 3  # rows end at different times
    assert sum(count > 0 for count in result.accepted_histogram) > 3


def ended_in_turn(tiny, whole, policy, **ends):
    """Return how a text ended at each of its tokens in turn: 1 inside a draft, else 0."""
    kinds = set()
    for end in some(sorted(set(whole)), 8):
        given = {name: value(end) for name, value in ends.items()}
        options = {"policy": policy, "max_new_tokens": 30, "seed": 4, "num_draft_tokens": 4}
        result = generate(*tiny, PROMPT, **BLOCK, **given, **options)
        assert result.ended
        assert result.output_token_ids[0].tolist() == whole[: whole.index(end) + 1]
        assert result.reading.rows <= result.num_tokens
        kinds.add(result.num_accepted + result.target_calls - result.num_tokens)
    return kinds


@pytest.mark.parametrize("policy", ["soft_band:price=0.5"] + THOROUGH * POLICIES)
@pytest.mark.parametrize("by", ["eos_token_ids", "stop"])
def test_texts_end_inside_a_block_and_after_it(tiny, policy, by):
    ends = {"eos_token_ids": lambda end: end, "stop": lambda end: lambda ids: ids[0, -1] == end}
    options = {"max_new_tokens": 30, "seed": 4, "num_draft_tokens": 4}
    whole = generate(*tiny, PROMPT, policy=policy, **BLOCK, **options).output_token_ids[0].tolist()
    assert ended_in_turn(tiny, whole, policy, **{by: ends[by]}) == {0, 1}


@pytest.mark.parametrize(
    ("policy", "verifier", "message"),
    [
        ("soft_band:price=1", "chain", "chain judges .* try verifier='block'"),
        ("typical", "block", "verifier: block needs .* typical has neither"),
        (Between("typical", opening=3, closing=4), "block", "typical has neither"),
        (["speculative", "soft_band:price=1"], "chain", "soft_band:price=1.0 needs"),
        ("speculative", "knot", "verifier: must be one of .*; got 'knot'"),
    ],
)
def test_policies_that_a_verifier_cannot_follow_are_refused(tiny, policy, verifier, message):
    ids = PROMPT.expand(2, -1)
    with pytest.raises(ValueError, match=message):
        generate(*tiny, ids, policy=policy, verifier=verifier, max_new_tokens=4)
