"""Which decodes the device loop takes, what it says of the others, and its seam for kernels."""

import re

import pytest
import torch

from cactus_theory.decoding import Callbacks, ModelDrafter, NGram, device, generate
from cactus_theory.decoding.device import verify

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
KERNELS = {"device_loop": "kernels"}


def run(tiny, draft=None, **options):
    common = {"policy": "speculative", "max_new_tokens": 5, "device_loop": True}
    return generate(tiny[0], draft or tiny[1], IDS, **(common | options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": NGram()}, "a drafter is more than a model"),
        ({"stop": lambda ids: False}, "stop is used"),
        ({"record_rows": True}, "record_rows is used"),
        ({"callbacks": Callbacks(on_rows=lambda *rows: None)}, "on_rows is used"),
        ({"fast_forward": False}, "fast_forward is used"),
        ({"verifier": "block:bonus=policy"}, "one more draft row"),
        ({"logits_processor": [lambda ids, scores: scores]}, "processors"),
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


def test_on_a_cpu_kernels_run_only_when_asked_for_and_interpreted(single, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run(single, device_loop=True).loop == "device"
    assert run(single, device_loop=None).loop == "host"
    monkeypatch.delenv("TRITON_INTERPRET")
    if verify.find_spec("triton") is not None:
        with pytest.raises(ValueError, match="kernels do not run on cpu"):
            run(single, **KERNELS)
