"""Prepared weights compute the same function, and notice when the model changes."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cactus_theory.decoding.models import CachedModel, llama_forward, projections
from cactus_theory.decoding.models.projections import HALF_UP_TO, Linear, Ordered, packs

IDS = torch.tensor([[1, 5, 9, 2]])


def half_exact(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().float()


needs_kernel = pytest.mark.skipif(Linear(torch.eye(2)).half is None, reason="needs FBGEMM")


def prepared_weights(kind, weight, bias=None):
    module = SimpleNamespace(weight=weight, bias=bias)
    return Ordered(module) if kind == "ordered" else Linear(weight, bias)


def kernel_calls(linear, x, monkeypatch):
    """Return the image of ``x`` and how often the half-precision kernel was asked for it."""
    kernel, calls = torch.fbgemm_linear_fp16_weight_fp32_activation, []

    def counted(*args):
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", counted)
    return linear(x), len(calls)


# of what weights are made into: their dtype, whether half precision holds them, largest error
KINDS = {
    "turned": (torch.float32, False, 1e-4),
    "double": (torch.float64, False, 1e-10),
    "half": (torch.float32, True, 1e-4),
    "packed bfloat16": (torch.bfloat16, True, None),  # by rounding
    "packed float16": (torch.float16, True, None),
    "ordered": (torch.float32, False, 1e-4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_prepared_weights_compute_the_same_map(kind, rows, biased, monkeypatch):
    dtype, exact, error = KINDS[kind]
    weight, x = half_exact(700, 500), half_exact(rows, 500, seed=2) / 3
    weight[0, :10], weight[0, 10:] = 2.0**-24 * torch.arange(10), 0.0  # to the last subnormal
    weight = (weight if exact else weight * (1 + 2.0**-12)).to(dtype)
    bias, x = half_exact(700, seed=1).to(dtype) if biased else None, x.to(dtype)
    linear = prepared_weights(kind, weight, bias)
    half, needs_packed = getattr(linear, "half", None), kind == "ordered" or error is None
    if (kind == "half" and half is None) or (needs_packed and linear.packed is None):
        pytest.skip("no such kernel")
    assert (half is not None) == (kind == "half")
    found, calls = kernel_calls(linear, x, monkeypatch) if kind == "half" else (linear(x), 1)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert calls == 1 and found.dtype == dtype and found.shape == expected.shape
    off = (found - expected).abs()
    if error is None:
        scale = F.linear(x.abs().double(), weight.abs().double()) + 1
        assert linear.weight is None and (off <= torch.finfo(dtype).eps * scale).all()
    else:
        assert (off < error).all()
    if kind == "half" and rows and not biased:
        assert off[:, 0].max() < 1e-6 * expected[:, 0].abs().max()


def test_other_weights_keep_their_precision():
    weight = half_exact(70, 50)
    for changed in (weight * (1 + 2.0**-12), weight * 2.0**20, weight * 2.0**-20, weight.double()):
        assert Linear(changed).half is None
    assert Linear(weight.half()).half is None  # its rows would be half too


@needs_kernel
def test_much_work_goes_to_the_kernel_of_many_threads(monkeypatch):
    linear = Linear(half_exact(700, 500))
    x = half_exact(1 + HALF_UP_TO // 350_000, 500, seed=2)
    found, calls = kernel_calls(linear, x, monkeypatch)
    assert calls == 0
    assert (found - x.double() @ linear.weight.double().t()).abs().max() < 1e-3


@needs_kernel
def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch):
    weight, x = half_exact(70, 50), half_exact(3, 50, seed=2) / 3
    exact = x.double() @ weight.double().t()
    name = "fbgemm_linear_fp16_weight_fp32_activation"
    wrong = getattr(torch, name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, name, lambda *args: 1.001 * wrong(*args))
        assert Linear(weight).half is None
    monkeypatch.delattr(torch, name)
    linear = Linear(weight)
    assert linear.half is None
    assert (linear(x) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_a_right_kernel_weights_are_not_packed(dtype, monkeypatch):
    kind = "ordered" if dtype == torch.float32 else "packed"
    weight, x = half_exact(70, 50).to(dtype), half_exact(9, 50, seed=2).to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert prepared_weights(kind, weight).packed is None and not packs(weight)
    right = torch.ops.mkldnn._linear_pointwise
    wrong = SimpleNamespace(
        _reorder_linear_weight=torch.ops.mkldnn._reorder_linear_weight,
        _linear_pointwise=lambda *args: 1.1 * right(*args),
    )
    monkeypatch.setattr(torch.ops, "mkldnn", wrong)
    linear = prepared_weights(kind, weight)
    assert linear.packed is None and torch.equal(linear(x), F.linear(x, weight))


def logits(model):
    with torch.inference_mode():
        cached = CachedModel(model, 8)
        assert cached.fast
        return cached.feed(IDS, [4], [4]).clone()


CHANGES = {
    "in place": lambda weight: weight.mul_(1.5),
    "added": lambda weight: weight.add_(0.5),
    "copied": lambda weight: weight.copy_(weight.roll(1).mul(2)),
    "data copied": lambda weight: weight.data.copy_(weight.data.roll(1).mul(2)),
    "data scaled": lambda weight: weight.data.mul_(1.5),
    "data replaced": lambda weight: setattr(weight, "data", 1.5 * weight.data),
}


@pytest.mark.parametrize("kind", ["small", "large", "ordered", "packed"])
@pytest.mark.parametrize("change", [*CHANGES, "replaced"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_changed_weight_is_noticed(make_model, change, kind, inference, monkeypatch):
    """Also in weights made in inference mode, which count no versions; large ones are read live."""
    if kind in ("large", "ordered"):
        monkeypatch.setattr(llama_forward, "JOINED_ENTRIES", 0)
    if kind == "large":
        monkeypatch.setattr(llama_forward, "ORDERED_ENTRIES", 0)
    # halves of 8 bits, through two layers: logits up to 10 are off by some hundredths
    tolerance = 0.2 if kind == "packed" else 2e-5
    with torch.inference_mode(inference), torch.no_grad():
        model = make_model()
        if kind == "packed":
            model = model.bfloat16()
        projection = model.model.layers[1].mlp.up_proj
        assert projection.weight.is_inference() == inference
        before = logits(model)
        assert torch.equal(logits(model), before)
        if change == "replaced":
            projection.weight = torch.nn.Parameter(1.5 * projection.weight.detach())
        else:
            CHANGES[change](projection.weight)
        after = logits(model)
        expected = model(input_ids=IDS, use_cache=False).logits
    assert (after - before).abs().max() > (1e-4 if kind != "packed" else 1e-2)
    assert (after - expected).abs().max() < tolerance


# float64 sums of up to 48 products in another order
ROUNDING = 1e-12
# the library norms in float32, logits up to 10
FLOAT32 = 1e-4


def test_a_large_model_computes_the_same(monkeypatch, make_model):
    monkeypatch.setattr(llama_forward, "JOINED_ENTRIES", 0)
    model = make_model()
    ids = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = copy.deepcopy(model)(ids).logits
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
