"""Samples come from the target, the loss is forward KL, the pool survives kills."""

import math

import pytest
import torch

from simulations.train_pair.corpus import (
    END_OF_TEXT_ID,
    PoolPlan,
    Stream,
    build_pool,
    prefixes,
    sample,
)
from simulations.train_pair.train import (
    Plan,
    Shape,
    build,
    distil_loss,
    mixed_batches,
    overlap_loss,
    text_batches,
)


@pytest.fixture(scope="module")
def models():
    return build(Shape(2, 32), 300, seed=0).eval(), build(Shape(1, 32), 300, seed=1)


def scaled(model, factor):
    """Sharpen a fresh model so that its distribution is far from uniform."""
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)
    return model


def test_loss_is_forward_kl(models):
    target, draft = models
    window = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q = target(window[:, :-1]).logits.double().softmax(-1)
        p = draft(window[:, :-1]).logits.double().softmax(-1)
        got = distil_loss(target)(draft, window).item()
    assert got == pytest.approx((q * (q / p).log()).sum(-1).mean().item(), rel=1e-4)
    assert got > 1e-4


def test_loss_vanishes_at_the_target_and_teaches_the_draft_only(models):
    target, draft = models
    window = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    assert distil_loss(target)(target, window).item() == pytest.approx(0, abs=1e-6)
    target.zero_grad()
    distil_loss(target)(draft, window).backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(p.grad is not None for p in draft.parameters())


def test_overlap_loss_is_the_chance_of_rejection(models):
    target, draft = models
    window = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q = target(window[:, :-1]).logits.double().softmax(-1)
        p = draft(window[:, :-1]).logits.double().softmax(-1)
    got = overlap_loss(target)(draft, window)
    assert got.item() == pytest.approx(0.5 * (q - p).abs().sum(-1).mean().item(), abs=1e-5)
    assert got.item() > 1e-3
    target.zero_grad()
    got.backward()
    assert all(p.grad is None for p in target.parameters())


def test_samples_follow_the_model():
    """Chi-square of 4000 next tokens in about 20 bins of like mass; threshold at 1e-4."""
    model = scaled(build(Shape(1, 32), 300, seed=0).eval(), 4.0)
    prefix = torch.full((4000, 3), 7)
    drawn = sample(model, prefix, 4, torch.Generator().manual_seed(0))[:, -1]
    with torch.no_grad():
        probs = model(prefix[:1]).logits[0, -1].double().softmax(-1)
    order = probs.argsort()
    bins = (probs[order].cumsum(0) * 20).long().clamp(max=19)
    expected = torch.zeros(20, dtype=torch.double).index_add(0, bins, probs[order]) * 4000
    seen = torch.bincount(bins[order.argsort()][drawn], minlength=20)
    assert probs.max() > 0.02
    full = expected > 0
    assert (seen[~full] == 0).all() and full.sum() > 15
    assert ((seen - expected)[full] ** 2 / expected[full]).sum() < 52.4


def test_cached_sampling_equals_scoring_the_whole_row():
    model = scaled(build(Shape(2, 32), 300, seed=2).eval(), 8.0)
    prefix = torch.tensor([[0, 5, 9]])
    row = sample(model, prefix, 12, torch.Generator().manual_seed(5))
    generator, again = torch.Generator().manual_seed(5), prefix
    with torch.no_grad():
        while again.shape[1] < 12:
            probs = model(again, use_cache=False).logits[:, -1].softmax(-1)
            again = torch.cat([again, torch.multinomial(probs, 1, generator=generator)], 1)
    assert torch.equal(row, again)


def test_prefixes_begin_behind_end_of_text(stream):
    rows = prefixes(stream, 10, 6, torch.Generator().manual_seed(0))
    wanted = {tuple(stream.tokens[i : i + 5].tolist()) for i in stream.starts.tolist()}
    assert (rows[:, 0] == END_OF_TEXT_ID).all()
    assert all(tuple(row[1:]) in wanted for row in rows.tolist())


def test_prefixes_need_room():
    short = Stream(torch.zeros(5, dtype=torch.int32), torch.tensor([1]))
    with pytest.raises(ValueError, match="boundary 6 tokens before its end"):
        prefixes(short, 2, 6, torch.Generator())


def test_pool_goes_on_after_a_kill(models, stream, tmp_path):
    plan = PoolPlan(chunks=3, rows=4, length=10, seed=1)
    whole = build_pool(models[0], stream, plan, tmp_path)
    chunks = sorted(tmp_path.glob("*.pt"))
    assert whole.shape == (12, 10) and len(chunks) == 3
    chunks[1].unlink()
    assert torch.equal(build_pool(models[0], stream, plan, tmp_path), whole)


def test_mixed_batches_take_their_share(stream):
    plan = Plan(steps=1, batch_size=4, length=16)
    pool = torch.full((5, 17), 299, dtype=torch.int32)
    batches = mixed_batches(pool, text_batches(stream, plan), share=0.5)
    generator = torch.Generator().manual_seed(0)
    assert (batches(0, generator) == 299).all(1).sum() == 2
    assert batches(7, generator).shape == (1, 65)


def test_fresh_models_are_near_uniform(models):
    """Guards the chi-square above: without ``scaled`` it could not tell models apart."""
    with torch.no_grad():
        probs = models[0](torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
    assert probs.max().item() < 3 / 300 and math.isclose(probs.sum().item(), 1, rel_tol=1e-5)
