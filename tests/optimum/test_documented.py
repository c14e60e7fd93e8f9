"""What the optimum promises on every row: the budget, the certificate, the ways to ask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

import cactus_theory as ct
from cactus_theory.testing import strategies
from tests.amounts import some
from tests.formulas import ALL, TEN, by_hand
from tests.rows import pair

# the budget holds up to rounding of a sum of V terms; relative to 1 + δ
OVER_BUDGET = 1e-12
# promised for every divergence, on any row; and what ordinary rows really reach
CERTIFIED = 1e-8
ORDINARY = 1e-12
CERTIFIED_KL = 1e-9
# two ways to reach one point of the path: the acceptance is well conditioned in all of them
SAME_POINT = 1e-9
PRICED = tuple(
    spec
    for spec in ALL
    if ct.divergence(spec).concave_frontier and spec not in ("total_variation", "max_divergence")
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def check_promises(s, q, p, delta, spec, gap=CERTIFIED):
    assert (s.target >= 0).all()
    assert ((s.target.sum(-1) - 1).abs() <= ORDINARY).all(), spec
    accepted = torch.minimum(p, s.target).sum(-1)
    torch.testing.assert_close(s.acceptance, accepted, rtol=0, atol=1e-12)
    assert (s.divergence <= delta + OVER_BUDGET * (1 + delta)).all(), spec
    assert (s.gap.abs() <= gap).all(), (spec, s.gap.abs().max())
    assert (s.target[q == 0] == 0).all()


@given(rows=strategies.pairs(), delta=strategies.budgets())
def test_every_row_keeps_its_budget_and_certifies_itself(rows, delta):
    q, p = rows
    for spec in TEN:
        s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
        check_promises(s, q, p, delta, spec, CERTIFIED_KL if spec == "kl" else CERTIFIED)
        h = s.target
        band = torch.minimum(torch.maximum(p, s.lower * q), s.upper * q)
        torch.testing.assert_close(h, torch.where(q > 0, band, 0.0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", some(ALL, 9))
@pytest.mark.parametrize("delta", some([0.01, 0.3, 2.0, 1e-6], 3))
def test_ordinary_rows(spec, delta):
    q, p = pair(50, 40, seed=3)
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
    check_promises(s, q, p, delta, spec, ORDINARY)
    measured = by_hand(spec, s.target.numpy(), q.numpy())
    np.testing.assert_allclose(s.divergence, measured, rtol=1e-7, atol=1e-10)
    free = s.divergence < delta * (1 - 1e-6)
    torch.testing.assert_close(s.target[free], p[free], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", some(ALL, 9))
def test_an_edge_between_tokens_that_are_all_but_impossible(spec):
    # p7/q7 = 1e25: the edge above it cannot be read off ε, and must not fall below p0/q0
    q = tensor(3e-13, 1e-4, 1 - 1e-4 - 3e-13, 6.6e-26)
    p = tensor(1.24e-10, 3e-21, 8.7e-11, 1 - 1.24e-10 - 8.7e-11)
    for delta in (0.3, 2.0):
        s = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
        check_promises(s, q, p, delta, spec)


@pytest.mark.parametrize("spec", TEN)
def test_a_real_vocabulary(spec):
    q, p = pair(1, 151_936, seed=5, kinds=("spiky", "spiky"))
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=0.1)
    check_promises(s, q, p, 0.1, spec, CERTIFIED_KL)


@pytest.mark.parametrize("spec", some(ALL, 9))
def test_delta_price_and_acceptance_are_three_names_of_one_point(spec):
    q, p = pair(30, 12, seed=1)
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=0.05)
    again = ct.optimal_acceptance(q, p, divergence=spec, acceptance=s.acceptance)
    torch.testing.assert_close(again.divergence, s.divergence, rtol=0, atol=SAME_POINT)
    torch.testing.assert_close(again.acceptance, s.acceptance, rtol=0, atol=SAME_POINT)
    if spec in PRICED:
        priced = ct.optimal_acceptance(q, p, divergence=spec, price=s.price)
        torch.testing.assert_close(priced.acceptance, s.acceptance, rtol=0, atol=SAME_POINT)
        torch.testing.assert_close(priced.target, s.target, rtol=0, atol=SAME_POINT)


@given(rows=strategies.pairs(), wish=strategies.acceptances())
def test_acceptance_is_reached_when_asked_for(rows, wish):
    q, p = rows
    possible = min(wish, p[q > 0].sum().item())
    lossless = torch.minimum(p, q).sum().item()
    for spec in ("kl", "total_variation", "renyi:a=2", "max_divergence"):
        s = ct.optimal_acceptance(q, p, divergence=spec, acceptance=possible)
        assert s.acceptance.item() == pytest.approx(max(possible, lossless), abs=1e-9)


@given(rows=strategies.pairs(), price=strategies.budgets())
def test_any_price_stays_on_the_path(rows, price):
    q, p = rows
    s = ct.optimal_acceptance(q, p, price=price)
    check_promises(s, q, p, math.inf, "kl")
    lossless = torch.minimum(p, q).sum()
    assert lossless - 1e-12 <= s.acceptance <= p[q > 0].sum() + 1e-12


@pytest.mark.parametrize("spec", some(ALL, 9))
def test_the_trade_off_is_concave_where_it_is_declared(spec):
    q, p = pair(8, 15, seed=6)
    lossless = torch.minimum(p, q).sum(-1, keepdim=True)
    asked = lossless + (1 - lossless) * torch.linspace(0, 1, 33, dtype=torch.float64)
    wide = (row[:, None].expand(8, 33, 15) for row in (q, p))
    line = ct.optimal_acceptance(*wide, divergence=spec, acceptance=asked.clamp(max=1.0))
    torch.testing.assert_close(line.acceptance, asked, rtol=0, atol=SAME_POINT)
    assert (line.divergence[:, 0] <= 1e-12).all() and (line.divergence.diff(dim=-1) >= 0).all()
    chords = line.acceptance.diff(dim=-1) / line.divergence.diff(dim=-1)
    if ct.divergence(spec).concave_frontier:
        assert (chords.diff(dim=-1) <= 1e-6 * chords[:, :-1]).all()
        assert (line.price.diff(dim=-1) <= 1e-9).all()


def test_rows_broadcast():
    q, p = pair(5, 9, seed=7)
    s = ct.optimal_acceptance(q, p[0], delta=0.1)
    each = ct.optimal_acceptance(q, p[:1].expand(5, 9).contiguous(), delta=0.1)
    assert torch.equal(s.target, each.target) and s.target.shape == (5, 9)
    assert ct.optimal_acceptance(q[:0], p[:0], delta=0.1).acceptance.shape == (0,)


def test_numpy_in_numpy_out():
    q, p = pair(4, 9, seed=8)
    s = ct.optimal_acceptance(q, p, delta=0.1)
    n = ct.optimal_acceptance(q.numpy(), p.numpy(), delta=np.full(4, 0.1))
    for field in vars(s):
        assert isinstance(getattr(n, field), np.ndarray)
        np.testing.assert_array_equal(getattr(n, field), getattr(s, field).numpy())
    narrow = ct.optimal_acceptance(q.float().numpy(), p.float().numpy(), delta=0.1)
    assert narrow.target.dtype == np.float32 and narrow.gap.dtype == np.float64
    lists = ct.optimal_acceptance(q.tolist(), p.tolist(), delta=0.1)
    np.testing.assert_array_equal(lists.target, n.target)
