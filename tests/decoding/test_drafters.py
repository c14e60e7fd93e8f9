"""Drafters say what they promise, and are refused where they cannot work."""

import copy
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import cactus_theory as ct
from cactus_theory.decoding import (
    EarlyExit,
    FourBit,
    ModelDrafter,
    NGram,
    SkipLayers,
    generate,
    read_drafter,
    speculative_generate,
)
from cactus_theory.decoding.drafters.model import ACCEPTANCE, PLACES
from cactus_theory.decoding.drafters.ngram import NGramDrafting
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.text import Texts
from cactus_theory.traces import log_trace
from cactus_theory.verify import Assignment, Draft, find_verifier
from tests.decoding.conftest import random_llama

PROMPT = torch.tensor([[1, 5, 9]])


def looked_up(ids, wanted=4, longest=3, shortest=1):
    texts = Texts([ids], 8, frozenset(), torch.device("cpu"))
    return NGramDrafting(texts, range(longest, shortest - 1, -1)).look_up(0, wanted)


@pytest.mark.parametrize(
    ("ids", "found", "shortest"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2], 1),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2], 1),  # the latest match
        ([5, 1, 2, 3, 9, 2, 7, 1, 2], [3, 9, 2, 7], 1),  # the longest match beats the latest
        ([1, 2, 3], [], 1),
        ([4], [], 1),
        ([4, 4], [4], 1),
        ([4, 4, 4], [4], 1),
        ([1, 2, 3, 1], [], 2),
    ],
)
def test_ngrams_repeat_what_followed(ids, found, shortest):
    assert looked_up(ids, shortest=shortest) == found


def test_ngrams_of_a_growing_text_equal_a_fresh_index():
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (60,), generator=source).tolist()
    texts = Texts([ids[:1]], 80, frozenset(), torch.device("cpu"))
    drafting = NGramDrafting(texts, range(3, 0, -1))
    for token in ids[1:]:
        texts.rows[0].ids.append(token)
        assert drafting.look_up(0, 5) == looked_up(texts.rows[0].ids, 5)


def test_an_ngram_decode_makes_no_draft_calls(tiny):
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    result = generate(tiny[0], NGram(), ids, policy="cactus:delta=1", max_new_tokens=30)
    assert result.draft_calls == 0
    assert result.num_accepted > 0
    assert {drafted for drafted, _, _ in result.reading.rounds} > {0, 4}  # as much as was found
    told = result.statistics()
    assert 0 < told["num_drafts"] < told["num_calls"] == told["target_calls"]
    assert told["tokens_per_call"] == told["num_tokens"] / told["num_calls"]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_zero_weights_stay_zero_in_four_bits(make_model, dtype):
    target = make_model(layers=1).to(dtype)
    target.model.layers[0].mlp.up_proj.weight.data[:, :32] = 0
    rounded = FourBit().of(target)
    weight = rounded.model.layers[0].mlp.up_proj.weight
    assert not weight[:, :32].any() and not weight.isnan().any()


def test_weights_of_another_kind_are_not_rounded(tiny):
    packed = copy.deepcopy(tiny[0])
    for layer in packed.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in [name for name, child in part.named_children() if name != "act_fn"]:
                setattr(part, name, torch.nn.Identity())
    with pytest.raises(ValueError, match="layers must hold floating-point .*; got none in Llama"):
        read_drafter("4bit").check(packed)


EXACT = 1e-12  # sums of two products


@pytest.mark.parametrize("verifier", ["chain", "block"])
def test_withdrawing_in_the_smallest_example_emits_six_to_four(verifier):
    """q = (0.5, 0.5), p = (0.8, 0.2): the doubtful token emits q; dropping it, (0.6, 0.4)."""
    q, p = (torch.tensor([own], dtype=torch.float64) for own in ([0.5, 0.5], [0.8, 0.2]))
    for counts, emits in (([1, 1], (0.5, 0.5)), ([1, 0], (0.6, 0.4))):
        draft = Draft(torch.tensor([[0], [1]]), counts, p.expand(2, 1, 2))
        rule = Assignment((ct.policy("speculative"),))
        law = find_verifier(verifier).law(rule, q.expand(2, 2, 2), draft)
        refused = law.stop[:, :1] * law.last[:, 0]
        kept = torch.eye(2).double() * law.stop[:, 1:]
        found = p[0] @ (refused + kept)
        assert found.tolist() == pytest.approx(emits, abs=EXACT)


@pytest.mark.parametrize("name", ["model", "early exit"])
def test_rows_stop_where_the_product_falls(tiny, name):
    target, model = tiny
    stop, early, seen = 0.5, 0, []
    drafter = ModelDrafter(model, stop=stop) if name == "model" else EarlyExit(1, stop=stop)
    told = Callbacks(on_rows=lambda q, draft, texts, before: seen.append((draft, before)))
    ids = torch.tensor([[1, 5, 9], [2, 4, 8], [3, 3, 7]])
    generate(target, drafter, ids, num_draft_tokens=6, max_new_tokens=40, callbacks=told)
    for draft, before in seen:
        assert draft.token_ids.shape[1] == max(draft.counts)
        for row, (count, made) in enumerate(zip(draft.counts, before, strict=True)):
            most = min(6, 40 - made - 1)
            assert min(most, 1) <= count <= most
            at = draft.token_ids[row, :count, None]
            each = draft.probs[row, :count].gather(-1, at)[:, 0].numpy() if count else []
            product = np.interp(each, PLACES, ACCEPTANCE).cumprod() if count else np.ones(1)
            assert (product[:-1] >= stop).all()
            assert count == most or product[-1] < stop
            early += count < most
    assert early > 10


def test_a_zero_threshold_never_stops_and_one_stops_at_once(tiny):
    target, model = tiny
    options = {"policy": "speculative", "max_new_tokens": 40, "num_draft_tokens": 5, "seed": 2}
    free = generate(target, model, PROMPT, **options)
    never = generate(target, ModelDrafter(model, stop=0), PROMPT, **options)
    assert never.output_token_ids.tolist() == free.output_token_ids.tolist()
    assert never.reading.rounds == free.reading.rounds and never.draft_calls == free.draft_calls
    always = generate(target, ModelDrafter(model, stop=1.0), PROMPT, **options)
    assert {drafted for drafted, _, _ in always.reading.rounds} <= {0, 1}


def test_callbacks_are_told_what_was_drafted(tiny):
    target, model = tiny
    seen = []
    ids = torch.tensor([[1, 5, 9], [2, 4, 8], [3, 3, 7]])
    drafter = ModelDrafter(model, stop=0.5)
    told = Callbacks(on_round=lambda counts, seconds: seen.append(counts))
    result = generate(target, drafter, ids, policy="speculative", num_draft_tokens=6,
                      max_new_tokens=30, callbacks=told)  # fmt: skip
    assert sum((Counter(counts.rounds) for counts in seen), Counter()) == result.reading.rounds
    assert sum(counts.num_tokens for counts in seen) == result.num_tokens
    steps = (max(drafted for drafted, _, _ in counts.rounds) for counts in seen)
    assert sum(steps) == result.draft_calls


@pytest.mark.parametrize("width", [3, 8])
def test_deterministic_drafts_are_not_stopped(tiny, width):
    target, model = tiny
    options = {"max_new_tokens": 24, "temperature": 0.0, "policy": "speculative"}
    free, stopped = (
        generate(target, drafter, PROMPT, num_draft_tokens=width, **options)
        for drafter in (model, ModelDrafter(model, stop=0.9))
    )
    assert stopped.reading.rounds == free.reading.rounds


PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])


def llama(seed: int, vocabulary: int = 24, positions: int = 64):
    return random_llama(vocabulary, 1, positions, seed, pad_token_id=0, bos_token_id=None)


@pytest.fixture(scope="module")
def target():
    return llama(0)


@pytest.mark.parametrize("verifier", ["chain", "block"])
@pytest.mark.parametrize("size", [20, 30])
def test_a_draft_of_another_size_has_the_law_of_its_own_tokens(target, size, verifier) -> None:
    small, options = llama(1, size), {"max_new_tokens": 24, "seed": 5, "verifier": verifier}
    got = generate(target, small, PROMPTS, record_rows=True, **options)
    assert got.reading.emitted_divergence_per_token < 1e-12
    p = torch.stack([torch.from_numpy(node.p) for node in got.rows])
    assert p.shape[-1] == 24 and torch.allclose(p.sum(-1), torch.ones_like(p[..., 0]))
    assert size > 24 or not p[..., size:].any()
    if size > 24:  # what is cut is nothing but a smaller softmax
        cut = llama(1, 24)
        cut.load_state_dict({
            name: weight[:24] if name in ("model.embed_tokens.weight", "lm_head.weight") else weight
            for name, weight in small.state_dict().items()
        })  # fmt: skip
        alike = generate(target, cut, PROMPTS, **options)
        assert got.output_token_ids.equal(alike.output_token_ids)
    hooked = target.generate(
        PROMPTS[:1], custom_generate=speculative_generate, draft_model=small, max_new_tokens=8,
        do_sample=True, policy="speculative",
    )  # fmt: skip
    assert hooked.shape == (1, 11)


@pytest.mark.parametrize("fast", [True, False])
def test_a_shorter_draft_stops_where_its_positions_end(target, fast) -> None:
    short, long = llama(1, positions=12), llama(1)
    options = {"seed": 3, "num_draft_tokens": 3, "fast_forward": fast}
    got = generate(target, short, PROMPTS, max_new_tokens=30, **options)
    assert got.output_token_ids.shape == (2, 30) and got.draft_calls < got.target_calls
    alike = generate(target, long, PROMPTS, max_new_tokens=30, **options)
    assert got.output_token_ids[:, :5].equal(alike.output_token_ids[:, :5])
    assert generate(target, short, PROMPTS.repeat(1, 5), max_new_tokens=4, seed=1).draft_calls == 0
    greedy = generate(target, ModelDrafter(short), PROMPTS, max_new_tokens=30, temperature=0)
    assert greedy.output_token_ids.equal(
        generate(target, None, PROMPTS, max_new_tokens=30, temperature=0).output_token_ids
    )


def test_quantised_drafts_are_lossless(target, tmp_path: Path) -> None:
    draft = copy.deepcopy(llama(1)).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later torch has it elsewhere
        int8 = torch.ao.quantization.quantize_dynamic(draft, {torch.nn.Linear}, torch.qint8).eval()
    greedy = generate(target, None, PROMPTS, max_new_tokens=12, temperature=0).output_token_ids
    got = generate(target, int8, PROMPTS, max_new_tokens=12, seed=1)
    assert got.reading.emitted_divergence_per_token < 1e-12
    same = generate(target, int8, PROMPTS, max_new_tokens=12, temperature=0)
    assert same.output_token_ids.equal(greedy)
    log_trace(target, int8, PROMPTS.tolist(), tmp_path, num_draft_tokens=2, max_new_tokens=4)


def packed(model, where):
    """Quantise a model's linear layers, or one; or store one in eight bits."""
    model = copy.deepcopy(model).float()
    if where == "float8":
        part = model.model.layers[0].mlp.up_proj
        part.weight = torch.nn.Parameter(part.weight.to(torch.float8_e4m3fn), requires_grad=False)
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later torch has it elsewhere
        kinds = {torch.nn.Linear} if where == "all" else {"model.layers.0.mlp.up_proj"}
        return torch.ao.quantization.quantize_dynamic(model, kinds, torch.qint8).eval()


@pytest.mark.parametrize("where", ["all", "one", "float8"])
def test_packed_weights_are_not_rounded_to_four_bits(where) -> None:
    at = "self_attn.q_proj" if where == "all" else "layers.0.mlp.up_proj"
    with pytest.raises(ValueError, match=f"that are not packed; .*Linear'> at model.*{at}"):
        FourBit().of(packed(llama(1), where))


def test_a_copy_that_does_not_run_is_blamed_and_not_the_target() -> None:
    """Gemma 3n embeds each token once more for every layer."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=24, vocab_size_per_layer_input=24, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, layer_types=["full_attention"] * 4, num_kv_shared_layers=0, laurel_rank=4,
        activation_sparsity_pattern=None, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    target = transformers.Gemma3nForCausalLM(config).eval()
    ids = torch.tensor([[3, 5, 7]])
    assert generate(target, None, ids, max_new_tokens=2).num_tokens == 2
    for drafter, kind in ((EarlyExit(1), "EarlyExit"), (SkipLayers(1), "SkipLayers")):
        said = f"draft_model: the copy of Gemma3nForCausalLM that {kind} drafts with does not run"
        with pytest.raises(ValueError, match=said) as error:
            generate(target, drafter, ids, max_new_tokens=2)
        assert "own generate" not in str(error.value)
