"""Batches, rates, losses and files of a training run."""

import pytest
import torch

from cactus_theory import losses
from cactus_theory.decoding.load import load_model
from simulations.train.corpus import Stream
from simulations.train.fit import (
    Plan,
    Shape,
    build,
    mixed_batches,
    rejected,
    save,
    target_loss,
    text_batches,
)

PLAN = Plan(steps=12, batch_size=4, length=16, seed=3)
SHAPE = Shape(1, 32)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_windows_are_pieces_of_the_stream(stream):
    batches = text_batches(stream, PLAN)
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


def test_short_stream_and_bad_shapes_are_refused(stream):
    with pytest.raises(ValueError, match="stream must exceed 40001 tokens, got"):
        text_batches(stream, Plan(steps=1, length=10_000))
    with pytest.raises(ValueError, match="head size must divide width, got 32 and 48"):
        build(Shape(1, 48), 300, seed=0)


def test_mixed_batches_take_their_share(stream):
    own = text_batches(Stream(torch.full((80,), 299, dtype=torch.int32), torch.tensor([1])), PLAN)
    batches = mixed_batches(own, text_batches(stream, PLAN), share=0.5)
    generator = torch.Generator().manual_seed(0)
    assert (batches(0, generator)[:, 1:] == 299).all(1).sum() == 2
    assert batches(7, generator).shape == (1, 65)


@pytest.mark.parametrize("loss", [losses.forward_kl, rejected])
def test_a_loss_of_the_target_is_a_mean_and_teaches_the_draft_only(loss):
    target, draft = build(Shape(2, 32), 300, seed=0).eval(), build(SHAPE, 300, seed=1)
    window = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    found = target_loss(target, loss)(draft, window)
    with torch.no_grad():
        q, p = (model(window[:, :-1]).logits.double().softmax(-1) for model in (target, draft))
    exact = {losses.forward_kl: (q * (q / p).log()).sum(-1), rejected: 0.5 * (q - p).abs().sum(-1)}
    assert found.item() == pytest.approx(exact[loss].mean().item(), rel=1e-3)  # of float32 rows
    found.backward()
    assert all(own.grad is None for own in target.parameters())
    assert all(own.grad is not None for own in draft.parameters())


def test_saved_weights_are_half_precision_and_the_model_keeps_its_own(tmp_path):
    model = build(SHAPE, 300, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save(model, tmp_path)
    loaded = load_model(tmp_path)
    assert same(before, model.state_dict())
    assert {own.dtype for own in loaded.parameters()} == {torch.float32}
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name].half().float())
