"""Projections that lie together in memory are read as one, and only those."""

import copy

import pytest
import torch
from torch import nn

from cactus_theory.decoding.models import CachedModel, llama_forward, projections
from cactus_theory.decoding.models.projections import adjacent, lay_together

# float64 sums of up to 48 products in another order
ROUNDING = 1e-12
# the library norms in float32, logits up to 10
FLOAT32 = 1e-4


def parts():
    return [nn.Linear(6, size, bias=False) for size in (4, 2, 3)]


def test_weights_stay_and_become_one():
    own = parts()
    before = [part.weight.clone() for part in own]
    assert adjacent(own) is None
    lay_together(own)
    assert all(part.weight.equal(old) for part, old in zip(own, before, strict=True))
    assert adjacent(own).equal(torch.cat(before))
    own[1].weight.data.mul_(2)
    assert adjacent(own)[4:6].equal(2 * before[1])


def test_what_is_not_one_memory_is_not_read_as_one():
    own = parts()
    lay_together(own)
    assert adjacent([own[0], own[2]]) is None  # a gap
    assert adjacent([own[1], own[0]]) is None  # another order
    own[1].bias = nn.Parameter(torch.zeros(2))
    assert adjacent(own) is None
    own[1].bias = None
    own[2].weight = nn.Parameter(own[2].weight.clone())
    assert adjacent(own) is None


@pytest.mark.parametrize("together", [False, True])
def test_a_large_model_computes_the_same(monkeypatch, make_model, together):
    monkeypatch.setattr(llama_forward, "JOINED_ENTRIES", 0)
    model = make_model()
    ids = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = copy.deepcopy(model)(ids).logits
        if together:
            for layer in model.model.layers:
                lay_together(
                    [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
                )
                lay_together([layer.mlp.gate_proj, layer.mlp.up_proj])
        ran = CachedModel(model, 9, 2, fast_forward=True)
        found = torch.cat([ran.feed(part, [3, 3], [3, 3]) for part in ids.split(3, 1)], 1)
    assert (found - expected).abs().max().item() < FLOAT32
    again = CachedModel(copy.deepcopy(model), 9, 2, fast_forward=True)
    with torch.inference_mode():
        whole = again.feed(ids, [9, 9], [9, 9])
    assert (found - whole).abs().max().item() < ROUNDING * whole.abs().max().item()


def test_halves_are_packed_up_to_a_size_that_counts_the_head(make_model, monkeypatch):
    model = make_model().bfloat16()
    if not projections.packs(model.lm_head.weight):
        pytest.skip("no such kernel")
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    ids = torch.tensor([[1, 5, 9, 2]])
    for spare, packed in ((model.lm_head.weight.numel(), True), (0, False)):
        monkeypatch.setattr(llama_forward, "PACKED_ENTRIES", layers + spare)
        weights = llama_forward.Weights(model)
        assert isinstance(weights.head, projections.Linear) == packed
        with torch.inference_mode():
            found = CachedModel(model, 4).feed(ids, [4], [4])
            # bfloat16 of 8 bits through two layers, logits of some units
            assert (found - model(ids).logits).abs().max() < 0.2
