"""Losses of drafts: values against the optimum and formulas, gradients against differences."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory import losses
from tests.amounts import amount, some
from tests.formulas import by_hand

SMOOTH = ("kl", "squared_hellinger", "pearson_chi2", "jensen_shannon", "alpha:a=0.5", "reverse_kl")
STEP = 1e-6
# a central difference of a piecewise smooth function: rounding of V over the step
SLOPE = 1e-8
# relative, of a float32 softmax over 151,936 tokens
SOFTMAX = 1e-4
FIELD = (losses.forward_kl, losses.total_variation, losses.log_overlap, losses.mixed)


def logits(seed=0, rows=6, vocab=9, zeros=True):
    """Return rows of target and draft; some with tokens that one of them excludes."""
    source = torch.Generator().manual_seed(seed)
    q, p = 2 * torch.randn(2, rows, vocab, generator=source, dtype=torch.float64)
    if zeros:
        q[: rows // 2, 0] = q[1, 1:4] = p[2, 3] = p[0, 5] = p[4, 1] = -torch.inf
        p[5, 2] = -715.0  # a subnormal probability
    return q, p


def value(q, p, price, kind):
    """Return acceptance − price × divergence of the optimum."""
    rows = q.softmax(-1), p.softmax(-1)
    best = ct.optimal_acceptance(*rows, divergence=kind, price=price)
    spent = 0.0 if price in (0.0, math.inf) else price * best.divergence
    return best.acceptance - spent


def differences(function, p):
    """Return the derivative of each row's value in each of its logits; all rows in one call."""
    steps = STEP * torch.eye(p.shape[-1], dtype=p.dtype)[:, None]
    up, down = function(torch.stack([p + steps, p - steps]))
    return ((up - down) / (2 * STEP)).T


@pytest.mark.parametrize("kind", some(SMOOTH, 3))
@pytest.mark.parametrize("price", some([0.0, 0.02, 1.0, 0.3, 5.0, math.inf], 3))
def test_the_loss_at_a_price_is_that_of_the_optimum_and_so_is_its_gradient(kind, price):
    for seed in range(amount(1, 12)):
        q, p = logits(seed)
        p.requires_grad_()
        judged = losses.at_price(q, p, price=price, divergence=kind)
        judged.loss.sum().backward()
        with torch.no_grad():
            assert torch.allclose(judged.loss, -value(q, p, price, kind), rtol=0, atol=1e-12)
            due = differences(partial(value, q, price=price, kind=kind), p).neg()
        deterministic = torch.isinf(p)  # no difference is known there, and nothing moves them
        assert torch.allclose(p.grad[~deterministic], due[~deterministic], rtol=0, atol=SLOPE)
        assert (p.grad[deterministic] == 0).all() and torch.isfinite(p.grad).all()


def test_at_the_ends_of_the_path_the_formulas_are_known():
    q, p = logits(3, zeros=False)
    p.requires_grad_()
    lossless = losses.at_price(q, p, price=math.inf)
    assert torch.allclose(lossless.loss, losses.total_variation(q, p) - 1, rtol=0, atol=1e-12)
    grads = [
        torch.autograd.grad(value.sum(), p)[0] for value in (lossless.loss, -losses.overlap(q, p))
    ]
    assert torch.allclose(*grads, rtol=0, atol=1e-12)
    near = p.detach() * 1e-3 + q  # h = p: nothing is cut, and the loss is the divergence
    near.requires_grad_()
    whole = losses.at_price(q, near, price=0.5)
    assert torch.allclose(whole.acceptance, torch.ones(6).double(), rtol=0, atol=1e-12)
    rows = near.softmax(-1), q.softmax(-1)
    spent = torch.from_numpy(by_hand("kl", *(value.detach().numpy() for value in rows)))
    assert torch.allclose(whole.loss, 0.5 * spent - 1, rtol=0, atol=1e-12)
    kl = (near.softmax(-1) * (near.log_softmax(-1) - q.log_softmax(-1))).sum()
    grads = [torch.autograd.grad(value, near)[0] for value in (whole.loss.sum(), 0.5 * kl)]
    assert torch.allclose(*grads, rtol=0, atol=1e-12)
    same = q.clone().requires_grad_()
    losses.at_price(q, same, price=1.0).loss.sum().backward()
    assert same.grad.abs().max() < 1e-12


def test_one_hot_rows_and_a_price_a_row():
    q = torch.tensor([[0.0, -torch.inf, -torch.inf], [0.3, 0.1, -0.5]])
    p = torch.tensor([[1.0, 2.0, 0.0], [-torch.inf, 0.0, -torch.inf]], requires_grad=True)
    judged = losses.at_price(q, p, price=torch.tensor([2.0, 0.5]))
    judged.loss.sum().backward()
    assert torch.allclose(judged.loss[0], -p[0].softmax(-1)[0])  # all that q can emit
    best = ct.optimal_acceptance(q.softmax(-1), p.detach().softmax(-1), price=[2.0, 0.5])
    assert torch.allclose(judged.acceptance.double(), best.acceptance, atol=1e-6)
    assert judged.acceptance.grad_fn is None and not p.grad[1].any()


@pytest.mark.parametrize("loss", FIELD)
def test_losses_of_the_field_and_their_gradients(loss):
    q, p = logits(5, zeros=False)
    q[0, 2] = -torch.inf
    p.requires_grad_()
    rows = q.softmax(-1), p.detach().softmax(-1)
    shared = np.minimum(*(row.numpy() for row in rows)).sum(-1)
    kl = by_hand("kl", *(row.numpy() for row in rows))
    weight = np.exp(-3 * shared)
    due = {
        losses.forward_kl: kl,
        losses.total_variation: 1 - shared,
        losses.log_overlap: -np.log(shared),
        losses.mixed: weight * kl + (1 - weight) * (1 - shared),
    }[loss]
    values = loss(q, p)
    assert np.allclose(values.detach().numpy(), due, rtol=0, atol=1e-12)
    values.sum().backward()

    def at(moved):
        rows = q.expand_as(moved), moved
        if loss is losses.mixed:  # its weight is detached
            held = torch.from_numpy(weight)
            return held * losses.forward_kl(*rows) + (1 - held) * losses.total_variation(*rows)
        return loss(*rows)

    with torch.no_grad():
        assert torch.allclose(p.grad, differences(at, p), rtol=0, atol=SLOPE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_rows_without_overlap_ruin_no_step(dtype):
    """ln of the overlap is finite, and no entry of its gradient above 1, whatever the rows."""
    far, never = [0.0, -200.0], [0.0, -math.inf]
    target = torch.tensor([far, never, never], dtype=dtype)
    draft = torch.tensor([far[::-1], far[::-1], never[::-1]], dtype=dtype, requires_grad=True)
    loss = losses.log_overlap(target, draft)
    loss.sum().backward()
    assert draft.grad is not None
    assert loss.isfinite().all() and (draft.grad.abs() <= 1).all()
    assert loss[0].item() == pytest.approx(200 - math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_over_a_large_vocabulary(dtype):
    source = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(2, 151_936, generator=source)
    p = (q + torch.randn(q.shape, generator=source)).to(dtype).requires_grad_()
    q = q.to(dtype)
    wide = p.detach().double().requires_grad_()
    calls = [lambda *rows: losses.at_price(*rows, price=1.0).loss, *FIELD]
    for call in calls[: amount(2, len(calls))]:
        narrow, due = call(q, p), call(q.double(), wide)
        assert narrow.dtype == torch.float32
        assert torch.allclose(narrow.double(), due, rtol=0, atol=1e-5)
        (narrow_grad,), (grad,) = (
            torch.autograd.grad(value.sum(), at) for value, at in ((narrow, p), (due, wide))
        )
        assert narrow_grad.dtype == dtype
        close = max(torch.finfo(dtype).eps, SOFTMAX)
        # rows are solved in float64; the field's losses take differences of float32 shares, of
        # which an ulp of a logit of 16 is 1e-6
        far = 1e-6 if call in FIELD else 1e-8
        assert torch.allclose(narrow_grad.double(), grad, rtol=close, atol=far)


def test_the_backward_pass_solves_nothing_and_keeps_one_tensor(monkeypatch):
    q, p = logits(1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape), lambda _: None
    ):
        p.requires_grad_()
        judged = losses.at_price(q, p, price=1.0)
    assert kept == [p.shape]
    judged = losses.at_price(q, p, price=1.0)
    monkeypatch.setattr(losses, "edges", None)
    judged.loss.mean().backward()
    with torch.no_grad():
        monkeypatch.undo()
        assert torch.equal(losses.at_price(q, p, price=1.0).loss, judged.loss)


def test_places_of_a_block_count_as_far_as_they_are_reached():
    accepted = torch.tensor([[0.5, 0.25, 0.75], [1.0, 0.0, 0.9]], requires_grad=True)
    due = torch.tensor([[0.5 + 0.125 + 0.09375], [1.0]])[:, 0]
    values = losses.along_block(-accepted, accepted)
    assert torch.allclose(values, -due)
    values.sum().backward()
    assert torch.allclose(accepted.grad, -torch.tensor([[1.0, 0.5, 0.125], [1.0, 1.0, 0.0]]))
