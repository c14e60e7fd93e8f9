"""An inflated model computes what the small one does, at the cost of its shape."""

import argparse
import copy
from dataclasses import replace

import pytest
import torch

from cactus_theory.commands import models as flags
from cactus_theory.decoding import generate
from cactus_theory.decoding.models import CachedModel
from simulations.common import inflate as inflated
from simulations.common.inflate import DRAFTS, SHAPES, Shape, inflate, inflate_pair
from simulations.common.inputs import PAIR
from tests.amounts import some

transformers = pytest.importorskip("transformers")

# sums of a few hundred products in other orders, over logits up to 18: 1.5e-5 measured
FLOAT32 = 1e-4
# the same in float64, logits up to 60; the library's own pass norms in float32 even then
FLOAT64 = 1e-11
# of the mass of a row: one copy of less than 40 tokens, e^-20 of these where the rms is largest
COPIES = 1e-8
# mean total variation between rows in bfloat16 and in float32, text of random ids. Measured
# 0.0075 and 0.0079 for the inflated pair, 0.0082 and 0.0080 for the small pair's own bfloat16
BFLOAT16 = 0.015
# by how much inflation may add to what bfloat16 itself does
ADDED = 1.5

SMALL = Shape(48, 3, 8, 2, 16, 64, 61)
SHAPES_TRIED = {
    "groups, deeper, heads twice as large": SMALL,
    "tied": replace(SMALL, tied=True),
    "same heads, wider": Shape(264, 2, 12, 3, 8, 56, 61),
    "few more channels": Shape(36, 2, 4, 2, 8, 48, 40),
}
POLICIES = ("speculative", "cactus:delta=0.1", "band:price=1", "typical", "mixture:alpha=0.5")


def random_llama(seed=0, **options):
    """Return a small model with two query heads a group and spread logits, float64."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**(sizes | heads | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).double().eval()
        for name, weight in model.named_parameters():  # norms of ones would hide their scaling
            weight.data.mul_(1 + 0.3 * torch.randn_like(weight))
            weight.data.mul_(1 if "norm" in name else 12)
    return model


@pytest.fixture(scope="module")
def large(shipped):
    """The shipped pair in tiny shapes that are larger than it, float32."""
    return (
        inflate(shipped.target, SHAPES["tiny"], dtype=torch.float32),
        inflate(shipped.draft, SHAPES["tiny-draft"], dtype=torch.float32),
    )


def unshifted(logits):
    """Take out a constant that is added to all logits, which changes no probability."""
    return logits - logits.mean(-1, keepdim=True)


@torch.inference_mode()
def cached(model, ids, fast):
    """Return the logits of a prompt and then of the rest token by token, and of two at last."""
    ran = CachedModel(model, ids.shape[1], len(ids), fast_forward=fast)
    pieces = [ids[:, :7], *ids[:, 7:-2].split(1, 1), ids[:, -2:]]
    return torch.cat([ran.feed(i, [i.shape[1]] * len(i), [i.shape[1]] * len(i)) for i in pieces], 1)


@pytest.mark.parametrize("name", SHAPES_TRIED)
@pytest.mark.parametrize("fast", [True, False])
def test_logits_are_those_of_the_small_model(name, fast):
    shape = SHAPES_TRIED[name]
    model = random_llama(tie_word_embeddings=shape.tied)
    big = inflate(model, shape, dtype=torch.float64)
    ids = torch.randint(0, 40, (2, 14), generator=torch.Generator().manual_seed(1))
    expected, found = cached(model, ids, fast), cached(big, ids, fast)
    assert expected.std() > 1
    apart = (unshifted(found[..., :40]) - unshifted(expected)).abs().max().item()
    assert apart < (FLOAT64 if fast else FLOAT32)
    assert found.softmax(-1)[..., 40:].sum(-1).max() < COPIES


def test_bfloat16_costs_what_it_costs_the_small_model(shipped):
    ids = torch.randint(1, 2048, (2, 24), generator=torch.Generator().manual_seed(3))
    for small, name in ((shipped.target, "tiny"), (shipped.draft, "tiny-draft")):
        big, half = inflate(small, SHAPES[name]), copy.deepcopy(small).bfloat16()
        with torch.inference_mode():
            exact = small(ids).logits.softmax(-1)
            rows = [model(ids).logits[..., :2048].float().softmax(-1) for model in (big, half)]
        apart, own = ((row - exact).abs().sum(-1).mean().item() / 2 for row in rows)
        assert apart < BFLOAT16
        assert apart < ADDED * own


def new_ids(target, draft, prompts, **options):
    common = {"max_new_tokens": 9, "num_draft_tokens": 3, "eos_token_ids": 0}
    result = generate(target, draft, prompts, **(common | options))
    return result.output_token_ids.tolist(), result.reading.acceptance_histogram


@pytest.mark.parametrize(
    ("policy", "temperature"), [("speculative", 0), *((own, 1) for own in some(POLICIES, 2))]
)
def test_decodes_are_those_of_the_small_pair(shipped, large, policy, temperature):
    prompts = torch.randint(1, 2048, (2, 9), generator=torch.Generator().manual_seed(4))
    options = {"policy": policy, "temperature": temperature, "seed": 5, "meter": False}
    found = new_ids(*large, prompts, **options)
    assert found == new_ids(shipped.target, shipped.draft, prompts, **options)
    assert sum(map(len, found[0])) > 9


def test_rows_hold_no_zero_and_copies_hold_no_mass(shipped, large):
    """So verification and meter cost what they cost on dense rows, and the law is the pair's."""
    ids = torch.randint(1, 2048, (2, 24), generator=torch.Generator().manual_seed(3))
    for model in large:
        with torch.inference_mode():
            rows = model(ids).logits.softmax(-1)
        assert rows.min() > torch.finfo(torch.float32).tiny
        assert rows[..., 2048:].sum(-1).max() < COPIES


def test_named_shapes_go_together_and_hold_the_shipped_pair(shipped, large):
    for target, draft in DRAFTS.items():
        assert SHAPES[target].vocab == SHAPES[draft].vocab
        assert SHAPES[draft].parameters < SHAPES[target].parameters / 9
        for model, name in ((shipped.target, target), (shipped.draft, draft)):
            inflated._check(model, SHAPES[name], torch.float32)
    for name, size in {"134m": 134e6, "5m": 5e6}.items():
        assert SHAPES[name].parameters == pytest.approx(size, rel=0.03)
    for model, name in zip(large, ("tiny", "tiny-draft"), strict=True):
        assert sum(own.numel() for own in model.parameters()) == SHAPES[name].parameters


def test_memory_is_asked_first(shipped, monkeypatch):
    monkeypatch.setattr(inflated, "free_memory", lambda device: 48.4e6)
    large = inflate_pair(shipped, "tiny", dtype=torch.bfloat16)  # 24.5 MB; 48.9 in float32
    assert (large.target.dtype, large.draft.dtype) == (torch.bfloat16, torch.bfloat16)
    assert large.tokenizer is shipped.tokenizer
    with pytest.raises(ValueError, match=r"tiny .* take 49 MB in float32; 48 MB are free"):
        inflate_pair(shipped, "tiny")
    with pytest.raises(ValueError, match="must be one of 134m, 8b, .*; got '7b'"):
        inflate_pair(shipped, "7b")
    monkeypatch.undo()
    assert 1e6 < inflated.free_memory(torch.device("cpu"))


def test_what_is_new_is_no_zero_where_it_need_not_be():
    """Layers and heads beyond the model's work on random numbers, as those of a real model do."""
    state = inflate(random_llama(), SMALL).state_dict()
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        extra = state[f"model.layers.2.{part}.weight"].float()
        assert extra.std().item() == pytest.approx(0.02, rel=0.1)


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = [
    ({}, {"hidden": 32}, "hidden must be at least 33"),
    ({}, {"layers": 1}, "layers must be at least 2"),
    ({}, {"kv_heads": 1, "heads": 4}, "kv_heads must be at least 2"),
    ({}, {"heads": 2}, "heads / kv_heads must be at least 2"),
    ({}, {"head": 12}, "head must be a multiple of 8"),
    ({}, {"inner": 47}, "inner must be at least 48"),
    ({}, {"vocab": 39}, "vocab must be at least 40"),
    ({}, {"tied": True}, "tied"),
    ({"attention_bias": True}, {}, "without biases"),
    ({"rope_parameters": SCALED}, {}, "rotary"),
]


@pytest.mark.parametrize(("model", "shape", "said"), REFUSED)
def test_models_and_shapes_that_do_not_fit_are_refused(model, shape, said):
    with pytest.raises(ValueError, match=said):
        inflate(random_llama(**model), replace(SMALL, **shape))


def test_half_precision_without_its_range_is_refused():
    with pytest.raises(ValueError, match="float16"):
        inflate(random_llama(), SMALL, dtype=torch.float16)


def test_flags_name_a_shape_and_every_table_says_what_it_costs():
    parser = argparse.ArgumentParser()
    flags.add_models(parser, target=PAIR / "target", draft=PAIR / "draft")
    inflated.add_inflate(parser)
    plain = parser.parse_args([])
    assert inflated.enlarging(plain) is None and "cost" not in plain
    assert flags.loaded(plain).target.dtype == torch.float32
    args = parser.parse_args(["--inflate", "tiny", "--dtype", "bfloat16"])
    large = flags.loaded(args, inflated.enlarging(args))
    assert large.target.dtype == torch.bfloat16
    ids = torch.tensor([[3, 7, 11]])
    generate(large.target, large.draft, ids, policy="speculative", max_new_tokens=2)  # no warning
    assert args.cost == (
        "the law of the pair at the cost of 11 M and 1 M parameters, V = 2,176, bfloat16, rows "
        "without zeros"
    )
