"""The numbers in the report are what their names say."""

import math

import pytest
import torch
import torch.nn.functional as F

from simulations.common.inputs import load_model
from simulations.train_pair.corpus import Stream
from simulations.train_pair.ship import forward_cost, held_out_loss, overlap
from simulations.train_pair.train import Shape, build, num_parameters, save


@pytest.fixture(scope="module")
def models():
    return build(Shape(2, 32), 300, seed=0).eval(), build(Shape(1, 32), 300, seed=1).eval()


@pytest.mark.parametrize("size", [3, 8, 9, 15, 16, 17, 24, 30])
def test_held_out_loss_scores_every_token_once(models, size):
    """With context 8: token t sees back to the start of the block before its own."""
    tokens = torch.randint(300, (size,), generator=torch.Generator().manual_seed(size))
    got = held_out_loss(models[0], Stream(tokens.int(), tokens), size=100, context=8)
    total = 0.0
    for t in range(1, size):
        first = max(0, (t - 1) // 8 * 8 - 8)
        with torch.no_grad():
            logits = models[0](tokens[None, first:t]).logits[0, -1]
        total += F.cross_entropy(logits, tokens[t]).item()
    assert got.tokens == size - 1
    assert got.nats_per_token == pytest.approx(total / (size - 1), rel=1e-5)
    assert got.bits_per_byte == pytest.approx(total / math.log(2) / 100, rel=1e-5)


def test_overlap_of_a_model_with_itself_is_one(models, stream):
    result = overlap(models[0], models[0], stream, rows=32, length=12, seed=0, prefix_tokens=4)
    assert result.mean == pytest.approx(1, abs=1e-5)
    assert result.positions == 32 * 8 and result.sequences == 32


def test_overlap_is_one_minus_total_variation(stream):
    """Models that ignore their input: the answer is known without sampling."""
    target, draft = build(Shape(1, 32), 300, seed=0), build(Shape(1, 32), 300, seed=1)
    with torch.no_grad():
        for model in (target, draft):
            model.model.embed_tokens.weight.copy_(torch.zeros(300, 32))
    same = overlap(target, draft, stream, rows=32, length=10, seed=0, prefix_tokens=4)
    assert same.mean == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        for model, token in ((target, 3), (draft, 4)):
            model.model.embed_tokens.weight.fill_(0.01)
            model.model.embed_tokens.weight[token] = 10.0
    apart = overlap(target, draft, stream, rows=32, length=10, seed=0, prefix_tokens=4)
    assert apart.mean < 0.01


def test_cost_is_the_ratio_of_medians(models):
    cost = forward_cost(*models, rounds=3)
    assert cost.ratio == pytest.approx(cost.draft_ms / cost.target_ms)
    assert cost.target_ms > 0


def test_saved_weights_are_half_precision_and_the_model_keeps_its_own(models, tmp_path):
    model = models[0]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    save(model, tmp_path)
    loaded = load_model(tmp_path)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name].half().float())
    assert num_parameters(loaded) == num_parameters(model)
    assert loaded.config.tie_word_embeddings and loaded.config.max_position_embeddings >= 1024
