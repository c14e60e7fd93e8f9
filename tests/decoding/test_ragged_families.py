"""Batch equals alone, token for token, in families that run the library's own forward pass.

Float64 models with experts taken one after the other: in float32 the size of a batch changes
sums in the last place, which can tip a coin or the choice of an expert.
"""

import copy

import pytest
import torch

from cactus_theory.decoding import Cascade, EarlyExit, ModelDrafter, NGram, generate
from cactus_theory.decoding.models.trial import runs_together
from cactus_theory.verify.contract import find_verifier
from tests.amounts import THOROUGH
from tests.decoding.models.families import build, families
from tests.rules import CHAIN, RULES


def follows(rule):
    """Say whether blocks can be verified under a policy."""
    try:
        find_verifier("block").check(rule)
    except ValueError:
        return False
    return True


POLICIES = ["speculative", "cactus:delta=0.4", "band:price=1.5", "typical"]
# the thorough run asks every registered policy, at one of its knobs
EVERY = {rule.name: spec for spec, rule in CHAIN.items()} if THOROUGH else {}
BLOCKS = {rule.name: spec for spec, rule in RULES.items() if follows(rule)} if THOROUGH else {}
OTHERS = [spec for name, spec in EVERY.items() if not any(own.startswith(name) for own in POLICIES)]
MODELS = {
    "GPT2": "GPT2LMHeadModel",
    "Mixtral": "MixtralForCausalLM",
    "Qwen2Moe": "Qwen2MoeForCausalLM",
    "Mistral in windows": "MistralForCausalLM",
    "Llama": "LlamaForCausalLM",
}
if not THOROUGH:
    del MODELS["Qwen2Moe"], MODELS["Llama"]
DRAFTERS = ["model", "greedy", "ngram", "cascade", "early exit"]
PROMPTS = [[5, 9, 11, 9, 11], [6], [3, 3, 7, 3, 3, 7, 3, 3, 7], [8, 4]]
SEEDS = [11, 4, 9, 100]
OPTIONS = {"max_new_tokens": 14, "num_draft_tokens": 4, "eos_token_ids": (7, 13, 3)}


@pytest.fixture(scope="module")
def pairs():
    found = {}
    for name, family in MODELS.items():
        target = build(*families()[family])
        draft = copy.deepcopy(target)
        source = torch.Generator().manual_seed(1)
        with torch.no_grad():
            target.get_output_embeddings().weight.mul_(3)  # rows far from uniform
            draft.get_output_embeddings().weight.mul_(3)
            for weight in draft.parameters():
                weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=source))
        assert runs_together(target)
        found[name] = target, draft
    return found


def drafter(name, model):
    return {
        "model": ModelDrafter(model),
        "greedy": ModelDrafter(model, greedy=True),
        "ngram": NGram(2, 1),
        "cascade": Cascade(ModelDrafter(model), NGram(2, 2)),
        "early exit": EarlyExit(1),
    }[name]


def assert_each_alone(target, draft, policy, verifier="chain"):
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS])
    options = {"policy": policy, "verifier": verifier, "meter": False} | OPTIONS
    batch = generate(target, draft, ids, attention_mask=mask, seed=SEEDS, **options)
    histogram = torch.zeros(OPTIONS["num_draft_tokens"] + 1, dtype=torch.int64)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        alone = generate(target, draft, torch.tensor([prompt]), seed=seed, **options)
        text = batch.output_token_ids[row, : batch.row_lengths[row]]
        assert text.tolist() == alone.output_token_ids[0].tolist()
        assert batch.row_ended[row] == alone.ended
        histogram += torch.tensor(alone.accepted_histogram)
    assert batch.accepted_histogram == tuple(histogram.tolist())
    return batch


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_each_alone_under_every_policy(pairs, name, policy):
    target, draft = pairs[name]
    result = assert_each_alone(target, draft, policy)
    assert sum(count > 0 for count in result.accepted_histogram) > 1


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_each_alone_under_the_other_policies(pairs, name, policy):
    assert_each_alone(*pairs[name], policy)


@pytest.mark.parametrize("policy", BLOCKS.values())
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_each_alone_by_blocks(pairs, name, policy):
    assert_each_alone(*pairs[name], policy, "block")


@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_each_alone_with_every_drafter(pairs, name, drafts):
    target, model = pairs[name]
    if drafts == "early exit" and not hasattr(target, "model"):
        with pytest.raises(ValueError, match="target_model: must hold its layers at model.layers"):
            assert_each_alone(target, EarlyExit(1), "speculative")
        return
    result = assert_each_alone(target, drafter(drafts, model), "cactus:delta=0.4")
    assert len(set(result.row_lengths)) > 1  # rows end at different times
