"""Decodes whose drafted paths are verified as a whole: the texts, their ends, what is refused."""

import pytest
import torch
import transformers

from cactus_theory.decoding import (
    Between,
    ByPosition,
    ModelDrafter,
    NGram,
    generate,
    generate_plain,
    speculative_generate,
)
from tests.amounts import THOROUGH, some
from tests.decoding.test_ragged import SEEDS, alone, compare, padded, prompts, together

PROMPT = torch.tensor([[1, 5, 9]])
POLICIES = ["speculative", "band:price=1.5", "soft_band:price=1", "cactus:delta=0.4"]
OPTIONS = {"max_new_tokens": 20, "num_draft_tokens": 4, "eos_token_ids": (7, 13, 15)}
BLOCK = {"verifier": "block"}


@pytest.fixture(scope="module")
def gpt2(make_draft):
    config = transformers.GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = transformers.GPT2LMHeadModel(config).double().eval()
        with torch.no_grad():
            target.lm_head.weight.mul_(20)
    return target, make_draft(target, noise=0.1)


EVERY = [*POLICIES, "valued"]
# by this package's own forward pass, by the library's, and by one that has no other
FORWARD = [("fast", policy) for policy in EVERY] + [
    (name, policy) for name in ("library", "GPT-2") for policy in some(EVERY[::-1], 1)
]


@pytest.mark.parametrize(("forward", "policy"), FORWARD)
def test_greedy_texts_are_the_targets(tiny, gpt2, forward, policy, values_file):
    target, draft = gpt2 if forward == "GPT-2" else tiny
    policy = f"soft_band:price=1,values={values_file}" if policy == "valued" else policy
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
    assert found.meter.kl == 0
    assert sum(count > 0 for count in found.accepted_histogram) > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_equal_each_alone(tiny, policy):
    result = compare(*tiny, prompts(), BLOCK | OPTIONS, policy)
    assert len(set(result.row_lengths)) > 3  # rows end at different times
    assert sum(count > 0 for count in result.accepted_histogram) > 3


@pytest.mark.parametrize("policy", some(POLICIES, 1))
def test_rows_equal_each_alone_without_a_lean_pass(gpt2, policy):
    result = compare(*gpt2, prompts(seed=7), BLOCK | OPTIONS, policy)
    assert result.num_accepted > 10


@pytest.mark.parametrize("policy", ["speculative", "soft_band:price=0.5"])
@pytest.mark.parametrize("certain", ["ngram", "greedy"])
def test_certain_drafts_keep_rows_apart(tiny, certain, policy):
    target, model = tiny
    drafter = NGram() if certain == "ngram" else ModelDrafter(model, greedy=True)
    result = compare(target, drafter, prompts(seed=5), BLOCK | OPTIONS, policy)
    assert result.num_accepted > 0


def test_rows_may_have_policies_and_schedules_of_their_own(tiny, values_file):
    rows = prompts(seed=2)
    policies = [
        "speculative",
        "soft_band:price=0.5",
        Between(f"soft_band:price=0.5,values={values_file}", opening=3, closing=4),
        "cactus:delta=1",
        ByPosition([(0, "speculative"), (6, "soft_band:price=0.5"), (12, "band:price=1")]),
        "band:delta=0.3",
        "soft_band:price=0.5",
    ]
    batch, result = together(*tiny, rows, SEEDS, policy=policies, **BLOCK, **OPTIONS)
    spent = 0.0
    for text, row, seed, policy in zip(batch, rows, SEEDS, policies, strict=True):
        single = alone(*tiny, row, seed, policy=policy, **BLOCK, **OPTIONS)
        assert text == single.output_token_ids[0].tolist()
        spent += single.meter.kl
    assert result.meter.kl == pytest.approx(spent, abs=1e-9)
    assert spent > 0.1


@pytest.mark.parametrize("policy", ["speculative", "band:price=1.5"])
def test_paths_of_one_token_are_verified_as_such(tiny, policy):
    """With K = 1 there is no path to look ahead on: the same coins give the same text."""
    options = {"policy": policy, "num_draft_tokens": 1, "max_new_tokens": 30, "seed": 5}
    chain, block = (generate(*tiny, PROMPT, verifier=own, **options) for own in ("chain", "block"))
    assert block.output_token_ids.tolist() == chain.output_token_ids.tolist()
    assert block.meter.kl == pytest.approx(chain.meter.kl, rel=1e-9)
    longer = [
        generate(*tiny, PROMPT, verifier=own, **options | {"num_draft_tokens": 5})
        for own in ("chain", "block")
    ]
    assert longer[0].output_token_ids.tolist() != longer[1].output_token_ids.tolist()


def ended_in_turn(tiny, whole, policy, **ends):
    """Return how a text ended at each of its tokens in turn: 1 inside a draft, else 0."""
    kinds = set()
    for end in some(sorted(set(whole)), 8):
        given = {name: value(end) for name, value in ends.items()}
        options = {"policy": policy, "max_new_tokens": 30, "seed": 4, "num_draft_tokens": 4}
        result = generate(*tiny, PROMPT, **BLOCK, **given, **options)
        assert result.ended
        assert result.output_token_ids[0].tolist() == whole[: whole.index(end) + 1]
        assert result.meter.rows <= result.num_tokens
        kinds.add(result.num_accepted + result.target_calls - result.num_tokens)
    return kinds


@pytest.mark.parametrize("policy", ["soft_band:price=0.5"] + THOROUGH * POLICIES)
@pytest.mark.parametrize("by", ["eos_token_ids", "stop"])
def test_texts_end_inside_a_block_and_after_it(tiny, policy, by):
    ends = {"eos_token_ids": lambda end: end, "stop": lambda end: lambda ids: ids[0, -1] == end}
    options = {"max_new_tokens": 30, "seed": 4, "num_draft_tokens": 4}
    whole = generate(*tiny, PROMPT, policy=policy, **BLOCK, **options).output_token_ids[0].tolist()
    assert ended_in_turn(tiny, whole, policy, **{by: ends[by]}) == {0, 1}


def test_logits_processors_reach_both_models(tiny):
    processors = [transformers.RepetitionPenaltyLogitsProcessor(1.5)]
    options = {"logits_processor": processors, "temperature": 0.0, "max_new_tokens": 25}
    plain = generate_plain(tiny[0], PROMPT, **options)
    other = generate_plain(tiny[0], PROMPT, **options | {"logits_processor": ()})
    found = generate(*tiny, PROMPT, policy="soft_band:price=1", **BLOCK, **options)
    assert found.output_token_ids.tolist() == plain.output_token_ids.tolist()
    assert found.output_token_ids.tolist() != other.output_token_ids.tolist()
    one = {"logits_processor": [transformers.TopKLogitsWarper(1)], "max_new_tokens": 25}
    sampled = generate(*tiny, PROMPT, policy="soft_band:price=0.1", **BLOCK, **one)
    assert sampled.output_token_ids.tolist() == other.output_token_ids.tolist()


@pytest.mark.parametrize("policy", ["soft_band:price=1", "cactus:delta=0.5"])
def test_a_schedule_that_never_changes_is_its_policy(tiny, policy):
    options = {"max_new_tokens": 30, "seed": 3, "verifier": "block"}
    single = generate(*tiny, PROMPT, policy=policy, **options)
    steps = ByPosition([(0, policy), (1000, "speculative")])
    scheduled = generate(*tiny, PROMPT, policy=steps, **options)
    assert scheduled.output_token_ids.tolist() == single.output_token_ids.tolist()
    assert scheduled.meter.kl == pytest.approx(single.meter.kl, rel=1e-9)
    assert single.meter.kl > 0.01


def test_a_closed_section_is_lossless(tiny):
    options = {"max_new_tokens": 25, "seed": 6, "verifier": "block"}
    never = Between("soft_band:price=0.2", opening=3, closing=12)
    strict = generate(*tiny, PROMPT, policy="speculative", **options)
    marked = generate(*tiny, PROMPT, policy=never, **options)
    assert 3 not in strict.output_token_ids[0].tolist()
    assert marked.output_token_ids.tolist() == strict.output_token_ids.tolist()
    assert marked.meter.kl == strict.meter.kl == 0
    inside = generate(*tiny, torch.tensor([[1, 3, 9]]), policy=never, **options)
    assert inside.meter.kl > 0.1


def test_the_hook_of_hugging_face_verifies_blocks(tiny):
    target, draft = tiny
    ids, mask = padded(prompts(seed=9), pad=6)
    inputs = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 6}
    inputs["max_new_tokens"] = 12
    ours = {"custom_generate": speculative_generate, "draft_model": draft} | BLOCK
    ours |= {"policy": "soft_band:price=1", "num_draft_tokens": 4}
    plain = target.generate(**inputs, do_sample=False)
    greedy = target.generate(**inputs, do_sample=False, **ours)
    assert greedy.tolist() == plain.tolist()
    hooked = target.generate(**inputs, do_sample=True, seed=3, top_k=0, **ours)
    own = {"attention_mask": mask, "max_new_tokens": 12, "seed": 3, "num_draft_tokens": 4}
    own["eos_token_ids"] = target.generation_config.eos_token_id
    direct = generate(*tiny, ids, policy="soft_band:price=1", **BLOCK, **own)
    assert (
        hooked[:, ids.shape[1] :].tolist()
        == direct.output_token_ids.where(direct.output_token_ids >= 0, 6).tolist()
    )


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
