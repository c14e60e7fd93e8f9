"""Captured rounds are the rounds that were captured; needs a CUDA device."""

import copy

import pytest
import torch

from cactus_theory.decoding import generate
from cactus_theory.decoding.device import loop as device_loop
from cactus_theory.decoding.device import round as device_round
from tests.decoding.device.test_same import ENDS, assert_same, prompts

# graphs that ran, one a bucket, and the round's own parts
POLICIES = [("cactus:delta=0.1", "chain"), ("typical", "chain"), ("band:price=1", "chain")]
POLICIES += [("speculative", "block"), ("band:price=1", "block")]


@pytest.fixture(scope="module")
def moved(tiny):
    """The small float64 pair on the device: rounding does not reach a coin."""
    return [copy.deepcopy(model).cuda() for model in tiny]


def on_device(moved, **options):
    given = {name: part.cuda() for name, part in prompts().items()}
    common = {"num_draft_tokens": 3, "max_new_tokens": 21, "eos_token_ids": ENDS, "seed": 1}
    return generate(*moved, **given, **(common | options))


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "verifier"), POLICIES)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_captured_rounds_are_the_usual_ones(moved, monkeypatch, policy, verifier, temperature):
    monkeypatch.setattr(device_loop, "BUCKET", 16)
    options = {"policy": policy, "verifier": verifier, "temperature": temperature}
    usual = on_device(moved, **options)
    graphs = []
    capturing = device_round.Repeated._capture
    monkeypatch.setattr(
        device_round.Repeated,
        "_capture",
        lambda own, end: graphs.append(end) or capturing(own, end),
    )
    assert_same(usual, on_device(moved, **options, device_loop="torch"))
    assert len(graphs) >= 2 and len(set(graphs)) == len(graphs)


@pytest.mark.gpu
def test_plain_decoding_is_captured(moved):
    given = {name: part.cuda() for name, part in prompts().items()}
    runs = [
        generate(moved[0], None, **given, max_new_tokens=12, device_loop=on)
        for on in (False, "torch")
    ]
    assert runs[1].output_token_ids.equal(runs[0].output_token_ids)


@pytest.mark.gpu
def test_what_waits_is_noticed():
    device = torch.device("cuda")
    value = torch.ones(3, device=device)
    assert device_round.never_waits(lambda: value + 1, device)
    assert not device_round.never_waits(lambda: float(value.sum()), device)
