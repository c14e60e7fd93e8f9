"""Batches, rates, losses and files of a training run."""

import pytest
import torch

from cactus_theory import losses
from cactus_theory.decoding.load import load_model
from simulations.train.fit import Plan, build, save, target_loss, text_batches


def test_windows_are_pieces_of_the_stream(stream):
    batches = text_batches(stream, 4, 16)
    pieces = {tuple(row) for row in stream.tokens.unfold(0, 16, 1).tolist()}
    generator = torch.Generator().manual_seed(0)
    for step in range(7):
        window = batches(step, generator)
        assert window.shape == (4, 17)
        assert all(tuple(row) in pieces for row in window[:, 1:].tolist())
    assert batches(7, generator).shape == (1, 65)


def test_rate_rises_holds_and_falls():
    plan = Plan(steps=100, peak_rate=1.0, warmup_steps=10, decay=0.5)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[49] == 1.0
    assert rates[75] == pytest.approx(0.5) and rates[99] == pytest.approx(0.02)


def test_a_short_stream_is_refused(stream):
    with pytest.raises(ValueError, match="stream must exceed 40002 tokens, got"):
        text_batches(stream, 1, 10_000)


@pytest.mark.parametrize("loss", [losses.forward_kl, losses.total_variation])
def test_a_loss_of_the_target_is_a_mean_and_teaches_the_draft_only(loss):
    target, draft = build(2, 32, 300, seed=0).eval(), build(1, 32, 300, seed=1)
    window = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    found = target_loss(target, loss)(draft, window)
    with torch.no_grad():
        q, p = (model(window[:, :-1]).logits.double().softmax(-1) for model in (target, draft))
    kl, variation = (q * (q / p).log()).sum(-1), 0.5 * (q - p).abs().sum(-1)
    exact = kl if loss is losses.forward_kl else variation
    assert found.item() == pytest.approx(exact.mean().item(), rel=1e-3)  # of float32 rows
    found.backward()
    assert all(own.grad is None for own in target.parameters())
    assert all(own.grad is not None for own in draft.parameters())


def test_saved_weights_are_half_precision_and_the_model_keeps_its_own(tmp_path):
    model = build(1, 32, 300, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save(model, tmp_path)
    loaded = load_model(tmp_path)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    assert {own.dtype for own in loaded.parameters()} == {torch.float32}
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name].half().float())
