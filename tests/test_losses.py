"""Losses of drafts: values against formulas, gradients against differences."""

import numpy as np
import pytest
import torch

from cactus_theory import losses
from tests.formulas import by_hand

STEP = 1e-6
# a central difference of a piecewise smooth function: rounding of the value over the step
SLOPE = 1e-8
# relative, of a float32 softmax over 151,936 tokens
SOFTMAX = 1e-4
# by how much the sum of such a row may miss 1: 2e-5 with AVX2, less with AVX-512
ROW_SUM = 4e-5
EVERY = (losses.forward_kl, losses.total_variation, losses.overlap)


def differences(function, p):
    """Return the derivative of each row's value in each of its logits; all rows in one call."""
    steps = STEP * torch.eye(p.shape[-1], dtype=p.dtype)[:, None]
    up, down = function(torch.stack([p + steps, p - steps]))
    return ((up - down) / (2 * STEP)).T


@pytest.mark.parametrize("loss", EVERY)
def test_values_and_gradients_are_those_of_the_formula(loss):
    source = torch.Generator().manual_seed(5)
    q, p = 2 * torch.randn(2, 6, 9, generator=source, dtype=torch.float64)
    q[0, 2] = -torch.inf
    p.requires_grad_()
    rows = q.softmax(-1), p.detach().softmax(-1)
    shared = np.minimum(*(row.numpy() for row in rows)).sum(-1)
    due = {
        losses.forward_kl: by_hand("kl", *(row.numpy() for row in rows)),
        losses.total_variation: 1 - shared,
        losses.overlap: shared,
    }[loss]
    values = loss(q, p)
    assert np.allclose(values.detach().numpy(), due, rtol=0, atol=1e-12)
    values.sum().backward()
    with torch.no_grad():
        moved = differences(lambda moved: loss(q.expand_as(moved), moved), p)
    assert torch.allclose(p.grad, moved, rtol=0, atol=SLOPE)


@pytest.mark.parametrize("loss", EVERY[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_over_a_large_vocabulary(loss, dtype):
    source = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(2, 151_936, generator=source)
    p = (q + torch.randn(q.shape, generator=source)).to(dtype).requires_grad_()
    q = q.to(dtype)
    wide = p.detach().double().requires_grad_()
    narrow, due = loss(q, p), loss(q.double(), wide)
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow.double(), due, rtol=0, atol=ROW_SUM)
    narrow.sum().backward()
    due.sum().backward()
    assert p.grad is not None and wide.grad is not None and p.grad.dtype == dtype
    close = max(torch.finfo(dtype).eps, SOFTMAX)
    # differences of float32 shares, of which an ulp of a logit of 16 is 1e-6
    assert torch.allclose(p.grad.double(), wide.grad, rtol=close, atol=1e-6)
