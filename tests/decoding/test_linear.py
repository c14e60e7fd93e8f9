"""Prepared weights compute the same function, and notice when the model changes."""

import pytest
import torch
import torch.nn.functional as F

from cactus_theory.decoding._linear import PACKED_FROM, Linear
from cactus_theory.decoding._model import CachedModel
from cactus_theory.decoding._round import closed_up

IDS = torch.tensor([[1, 5, 9, 2]])


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
def test_both_kernels_compute_the_same_map(rows, dtype, biased):
    source = torch.Generator().manual_seed(rows)
    weight = torch.randn(700, 500, generator=source).to(dtype)
    bias = torch.randn(700, generator=source).to(dtype) if biased else None
    x = torch.randn(rows, 500, generator=source).to(dtype)
    assert weight.numel() * 2 > PACKED_FROM
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = Linear(weight, bias)(x)
    assert found.dtype == dtype
    assert (found - exact).abs().max() < (1e-4 if dtype == torch.float32 else 1e-10)


def logits(model):
    with torch.inference_mode():
        cached = CachedModel(model, 8)
        assert cached.lean is not None
        return cached.feed(IDS, [4], [4]).clone()


@pytest.mark.parametrize("change", ["in place", "data", "replaced"])
def test_a_changed_weight_is_noticed(make_model, change):
    model = make_model()
    before = logits(model)
    assert torch.equal(logits(model), before)
    projection = model.model.layers[1].mlp.up_proj
    if change == "in place":
        with torch.no_grad():
            projection.weight.mul_(1.5)
    elif change == "data":
        projection.weight.data.mul_(1.5)
    else:
        projection.weight = torch.nn.Parameter(1.5 * projection.weight.detach())
    after = logits(model)
    with torch.inference_mode():
        expected = model(input_ids=IDS, use_cache=False).logits
    assert (after - before).abs().max() > 1e-3
    assert (after - expected).abs().max() < 2e-5


def test_gaps_are_closed_from_the_end():
    assert closed_up([True, True]) == [0, 1]
    assert closed_up([False, True, True]) == [2, 1]
    assert closed_up([False, False, True, False, True]) == [4, 2]
    assert closed_up([False, False]) == []
    source = torch.Generator().manual_seed(0)
    for _ in range(50):
        opened = (torch.rand(9, generator=source) < 0.6).tolist()
        rows = closed_up(opened)
        assert sorted(rows) == [row for row, on in enumerate(opened) if on]
        assert all(row >= place for place, row in enumerate(rows))
