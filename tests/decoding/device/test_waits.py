"""What a graph captures never asks the host for a value, and makes nothing of host values."""

import re
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import cactus_theory as ct
from cactus_theory.decoding import Callbacks, ModelDrafter, NGram, device, generate
from cactus_theory.decoding.device import verify
from cactus_theory.decoding.device.round import Inputs, Round, StaticForward, never_waits
from cactus_theory.decoding.device.verify import Logits, torch_step
from cactus_theory.decoding.models import CachedModel
from cactus_theory.verify.contract import find_verifier
from cactus_theory.verify.draft import Assignment

BATCH, WIDTH, VOCAB = 2, 3, 9000  # beyond the vocabulary from which rows are searched by blocks
CAPTURED = [
    ("chain", "speculative"),
    ("chain", "cactus:delta=0.1"),
    ("chain", "typical"),
    ("chain", "mixture:alpha=0.5"),
    ("chain", "lenience:lenience=0.5"),
    ("chain", "top_k:k=5"),
    ("chain", "speculative:tilt=0.11"),
    ("chain", "truncated:top_p=0.9"),
    ("block", "speculative"),
    ("block", "mixture:alpha=0.5"),
]


def step_of(verifier, policy):
    return torch_step(find_verifier(verifier), Assignment((ct.policy(policy),)), 1.0)


def logits_and_coins():
    source = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(BATCH, WIDTH + 1, VOCAB, generator=source)
    p = q[:, :WIDTH] + torch.randn(BATCH, WIDTH, VOCAB, generator=source)
    coins = torch.rand(BATCH, WIDTH + 1, generator=source, dtype=torch.float64)
    drafted = torch.tensor([3, 2])
    given = q, p, p.argmax(-1), drafted, coins[:, :-1], coins[:, -1], drafted + 9
    return Logits(*map(pretended, given))


@pytest.mark.parametrize(("verifier", "policy"), CAPTURED)
def test_these_are_verified_inside_the_graph(monkeypatch, verifier, policy):
    step, given = step_of(verifier, policy), logits_and_coins()
    with no_uploads(monkeypatch):
        verdict = step(given)
    assert verdict.last.is_cuda  # the device's branches ran


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_round_does_not_wait(monkeypatch, tiny, temperature):
    models = [CachedModel(model, 64, BATCH, fast_forward=True) for model in tiny]
    inputs = Inputs(BATCH, WIDTH, WIDTH, torch.device("cpu"))
    for name in ("counts", "coins", "tokens", "lengths", "draft_lengths"):
        setattr(inputs, name, pretended(getattr(inputs, name)))
    inputs.table[:] = 0.5
    inputs.upload([[3, 4, 2, 3], [5, 5, 1, 2]])
    step = torch_step(
        find_verifier("chain"), Assignment((ct.policy("cactus:delta=0.1"),)), temperature
    )
    round_ = Round(inputs, *map(StaticForward, models), temperature, step)
    with torch.inference_mode(), no_uploads(monkeypatch):
        done = round_(32)
    assert done.report.is_cuda and done.report.shape == (BATCH, WIDTH + 2)
    report = done.report.as_subclass(torch.Tensor)
    assert bool(((report >= 0) & (report < 24)).all())


def test_the_pretence_is_seen_through():
    tensor = pretended(torch.ones(3))
    for look in (bool, float, int, torch.Tensor.tolist, lambda x: (x + 1).sum().item()):
        with pytest.raises(Waited):
            look(tensor[:1])
    with pytest.raises(Waited):
        tensor[tensor > 0]


def test_one_upload_and_one_read_a_round(monkeypatch, shipped):
    """The host reads one tensor a round; all else that it knows is what it uploaded."""
    reads = []
    reader = torch.Tensor.tolist

    def counted(tensor):
        reads.append(tuple(tensor.shape))
        return reader(tensor)

    ids = torch.randint(1, 2048, (2, 7), generator=torch.Generator().manual_seed(0))
    options = {"policy": "cactus:delta=0.1", "max_new_tokens": 12, "meter": False}
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    result = generate(
        shipped.target, shipped.draft, ids, num_draft_tokens=3, **options, device_loop=True
    )
    reports = reads[reads.index((2, 5)) :]  # before them, the prompt and what tells the models
    assert reports == [(2, 5)] * result.target_calls


@pytest.mark.gpu
def test_what_waits_is_noticed():
    device = torch.device("cuda")
    value = torch.ones(3, device=device)
    assert never_waits(lambda: value + 1, device)
    assert not never_waits(lambda: float(value.sum()), device)


# what reads values on the host
READING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__")
READING += ("__index__", "__contains__", "masked_select", "unique", "allclose", "equal")


class Waited(AssertionError):
    """The host asked for a value."""


class Pretended(torch.Tensor):
    """Results of operations on it are such tensors, too."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READING:
            raise Waited(f"{name} waits for the device")
        if name in ("__getitem__", "__setitem__") and any(map(_mask, _parts(args[1]))):
            raise Waited(f"{name} with a mask waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def _parts(index):
    return index if isinstance(index, tuple) else (index,)


def _mask(index):
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def pretended(tensor):
    return tensor.as_subclass(Pretended)


@contextmanager
def no_uploads(monkeypatch):
    """Object to tensors made of host values, whose copy a capture refuses, too."""

    def refuse(made):
        def make(data, *args, **kwargs):
            if not isinstance(data, torch.Tensor) and isinstance(data, list | tuple):
                raise Waited("a list is copied to the device")
            return made(data, *args, **kwargs)

        return make

    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", refuse(torch.tensor))
        patch.setattr(torch, "as_tensor", refuse(torch.as_tensor))
        yield


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
KERNELS = {"device_loop": "kernels"}


def run(tiny, draft=None, **options):
    common = {"policy": "speculative", "max_new_tokens": 5, "device_loop": True}
    return generate(tiny[0], draft or tiny[1], IDS, **(common | options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": NGram()}, "a drafter is more than a model"),
        ({"stop": lambda ids, _: False}, "stop is used"),
        ({"record_rows": True}, "record_rows is used"),
        ({"callbacks": Callbacks(on_rows=lambda *rows: None)}, "on_rows is used"),
        ({"fast_forward": False}, "fast_forward is used"),
        ({"logits_processor": [RepetitionPenaltyLogitsProcessor(1.1)]}, "processors"),
    ],
)
def test_what_it_does_not_do_is_named(tiny, monkeypatch, options, said):
    with pytest.raises(ValueError, match=f"device_loop: .*{said}"):
        run(tiny, **options)
    monkeypatch.setattr(device, "captures", lambda device: True)  # as on a GPU
    assert said in run(tiny, **options, device_loop=None).loop
    assert run(tiny, **options, device_loop=False).loop == "host"


def test_drafters_with_options_and_other_models_are_refused(tiny, make_model):
    for drafter in (ModelDrafter(tiny[1], greedy=True), ModelDrafter(tiny[1], stop=0.3)):
        with pytest.raises(ValueError, match="more than a model"):
            run(tiny, drafter)
    hooked = make_model(seed=3)
    hooked.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="target_model, the model has hooks"):
        run((hooked, tiny[1]))


def test_without_a_gpu_it_runs_only_when_asked(tiny):
    assert run(tiny, device_loop=None).loop == "host"
    assert run(tiny).loop == "device"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "typical"}, "as typical has no kernel for chain"),
        ({"policy": "lenience:lenience=0.5", "verifier": "block"}, "has no kernel for block"),
        ({"policy": ["speculative", "cactus:delta=0.1"]}, "where texts have different policies"),
    ],
)
def test_without_a_kernel_torch_verifies_and_says_so(single, monkeypatch, in_torch, options, said):
    with pytest.raises(ValueError, match=f"device_loop: must not be 'kernels' here, .*{said}"):
        run(single, **(KERNELS | options))
    monkeypatch.setattr(device, "captures", lambda device: True)  # as on a GPU
    usual = run(single, **options, device_loop="torch")
    for on in (True, None):
        found = run(single, **options, device_loop=on)
        assert re.search(f"^device, by torch .*{said}", found.loop)
        assert found.output_token_ids.equal(usual.output_token_ids)


def test_float64_and_machines_without_triton_are_named(tiny, single, monkeypatch, in_torch):
    with pytest.raises(ValueError, match="where logits are float64"):
        run(tiny, **KERNELS)
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        run(single, **KERNELS)


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (extra kernels)")
def test_a_triton_that_is_too_old_is_named(single, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.__version__", "3.2.0")
    with pytest.raises(ValueError, match="Triton 3.2.0 is older than 3.4"):
        run(single, **KERNELS)


def test_on_a_cpu_kernels_run_only_when_asked_for_and_interpreted(single, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run(single, device_loop=True).loop == "device"
    assert run(single, device_loop=None).loop == "host"
    monkeypatch.delenv("TRITON_INTERPRET")
    if verify.find_spec("triton") is not None:
        with pytest.raises(ValueError, match="kernels do not run on cpu"):
            run(single, **KERNELS)
