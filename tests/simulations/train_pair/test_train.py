"""A run is a function of its plan, however often it was killed."""

import pytest
import torch

from simulations.train_pair.corpus import END_OF_TEXT_ID
from simulations.train_pair.train import Plan, Shape, build, fit, text_batches, text_loss

PLAN = Plan(steps=12, batch_size=4, length=16, seed=3)
SHAPE = Shape(1, 32)


def train(stream, checkpoint, plan=PLAN, *, every_s=60.0, stop_after=None, batches=None, seed=0):
    model = build(SHAPE, 300, seed=seed)
    fit(
        model,
        plan,
        batches or text_batches(stream, plan),
        text_loss,
        checkpoint,
        label="test",
        every_s=every_s,
        stop_after=stop_after,
    )
    return model.state_dict()


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def uninterrupted(stream, tmp_path_factory):
    torch.set_num_threads(1)
    return train(stream, tmp_path_factory.mktemp("whole") / "model.pt")


@pytest.mark.parametrize("step", [1, 5, 11])
def test_resumed_run_equals_uninterrupted(stream, tmp_path, uninterrupted, step):
    stopped = train(stream, tmp_path / "model.pt", stop_after=step)
    assert not same(stopped, uninterrupted)
    assert same(train(stream, tmp_path / "model.pt"), uninterrupted)


def test_run_killed_between_checkpoints_equals_uninterrupted(stream, tmp_path, uninterrupted):
    """Work after the last checkpoint is lost and done again with the same choices."""
    train(stream, tmp_path / "model.pt", stop_after=4)
    batches = text_batches(stream, PLAN)

    def killed(step, generator):
        if step == 7:
            raise KeyboardInterrupt
        return batches(step, generator)

    with pytest.raises(KeyboardInterrupt):
        train(stream, tmp_path / "model.pt", batches=killed)
    assert same(train(stream, tmp_path / "model.pt"), uninterrupted)


def test_global_generator_plays_no_part(stream, tmp_path, uninterrupted):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert same(train(stream, tmp_path / "model.pt"), uninterrupted)
    assert torch.equal(before, torch.get_rng_state())


def test_checkpoint_of_another_plan_is_refused(stream, tmp_path):
    train(stream, tmp_path / "model.pt", stop_after=1)
    with pytest.raises(ValueError, match="checkpoint model.pt must come from Plan.steps=13"):
        train(stream, tmp_path / "model.pt", Plan(steps=13, batch_size=4, length=16, seed=3))


def test_training_lowers_the_loss(stream, tmp_path):
    window = text_batches(stream, PLAN)(0, torch.Generator().manual_seed(0))
    model = build(SHAPE, 300, seed=0)
    before = text_loss(model, window).item()
    plan = Plan(steps=60, batch_size=4, length=16, seed=3, peak_rate=1e-2, warmup_steps=2)
    fit(model, plan, text_batches(stream, plan), text_loss, tmp_path / "m.pt", label="test")
    assert text_loss(model, window).item() < before - 1.5


def test_windows_are_pieces_of_the_stream(stream):
    batches = text_batches(stream, PLAN)
    pieces = {tuple(row) for row in stream.tokens.unfold(0, 16, 1).tolist()}
    generator = torch.Generator().manual_seed(0)
    for step in range(7):
        window = batches(step, generator)
        assert window.shape == (4, 17)
        assert all(tuple(row) in pieces for row in window[:, 1:].tolist())
    assert batches(7, generator).shape == (1, 65)


def test_all_windows_can_begin_at_starts(stream):
    batch = text_batches(stream, PLAN, share_at_starts=1.0)(0, torch.Generator().manual_seed(0))
    starts = {tuple(stream.tokens[i : i + 16].tolist()) for i in stream.starts.tolist()}
    for row in batch.tolist():
        behind = row[0] == END_OF_TEXT_ID
        assert tuple(row[1:] if behind else row[:16]) in starts


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
    with pytest.raises(ValueError, match="must be positive"):
        build(Shape(0, 32), 300, seed=0)


def test_longer_run_agrees_until_the_shorter_one_decays():
    short, long = Plan(steps=1000), Plan(steps=4000)
    assert [short.rate(s) for s in range(650)] == [long.rate(s) for s in range(650)]
    assert short.rate(700) < long.rate(700)


def test_fall_waits_for_the_hold():
    plan = Plan(steps=100, peak_rate=1.0, warmup_steps=1, decay=0.5, hold_steps=60)
    assert plan.rate(59) == 1.0
    assert plan.rate(60) == pytest.approx(0.8)
