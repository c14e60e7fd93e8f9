"""One budget over all rows: proven, met, and better than any other way to spend it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cactus_theory as ct
from cactus_theory.divergences.definition import examples
from cactus_theory.optimum.certificate import Geometry
from tests.amounts import amount, some
from tests.rows import pair

# sums of a few dozen float64 terms, at roots solved to 1e-13
EXACT = 1e-11
# what is asked is met this closely, relative to 1 + it
MET = 1e-12
POOLED = [
    spec for spec in examples() if ct.divergence(spec).additive and ct.divergence(spec).priced
]
KINDS = (("smooth", "smooth"), ("smooth", "spiky"), ("zeros", "zeros"), ("spiky", "tiny"))
Q, P = pair(6, 9, seed=2)


@pytest.mark.parametrize("spec", some(POOLED, 3))
@pytest.mark.parametrize("kinds", some(KINDS, 2), ids="-".join)
def test_a_budget_is_kept_and_the_bound_met(spec, kinds):
    q, p = pair(7, 12, seed=1, kinds=kinds)
    for delta in some((1e-4, 0.05, 1.0), 2):
        best = ct.pooled_acceptance(q, p, divergence=spec, delta=delta)
        assert best.mean_divergence <= delta + MET * (1 + delta)
        assert abs(best.gap) <= EXACT and best.bound == best.mean_acceptance + best.gap
        assert best.price == 0 or best.mean_divergence >= delta - MET * (1 + delta)
        accepted = torch.minimum(p, best.target).sum(-1)
        torch.testing.assert_close(accepted, best.acceptance, rtol=0, atol=EXACT)
        assert float(accepted.mean()) == pytest.approx(best.mean_acceptance, abs=EXACT)
        assert not best.target[q == 0].any()


@settings(max_examples=amount(6, 150), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(POOLED), st.floats(0.01, 0.8))
def test_no_other_split_of_the_budget_accepts_more(seed, spec, delta):
    noise = np.random.default_rng(seed)
    share = noise.dirichlet(np.ones(len(Q))) * len(Q) * delta
    split = ct.optimal_acceptance(Q, P, divergence=spec, delta=torch.from_numpy(share))
    best = ct.pooled_acceptance(Q, P, divergence=spec, delta=delta)
    assert float(split.acceptance.mean()) <= best.mean_acceptance + EXACT
    assert float(split.acceptance.mean()) <= best.bound + EXACT


def test_the_gain_over_equal_budgets_is_real():
    best = ct.pooled_acceptance(Q, P, delta=0.05)
    even = ct.optimal_acceptance(Q, P, delta=0.05).acceptance.mean()
    assert best.mean_acceptance > float(even) + 1e-4
    # every row pays the one price, but for those at their end
    priced = ct.optimal_acceptance(Q, P, price=best.price)
    torch.testing.assert_close(best.divergence, priced.divergence)


@pytest.mark.parametrize("spec", some(POOLED, 3))
def test_budget_price_and_acceptance_name_the_same_point(spec):
    first = ct.pooled_acceptance(Q, P, divergence=spec, delta=0.03)
    for knob, amount_of in (("price", first.price), ("acceptance", first.mean_acceptance)):
        again = ct.pooled_acceptance(Q, P, divergence=spec, **{knob: amount_of})
        assert again.mean_divergence == pytest.approx(0.03, rel=1e-9)
        assert again.mean_acceptance == pytest.approx(first.mean_acceptance, abs=EXACT)


def test_one_row_is_the_optimum():
    best = ct.optimal_acceptance(Q[0], P[0], delta=0.04)
    pooled = ct.pooled_acceptance(Q[0], P[0], delta=0.04)
    assert pooled.mean_acceptance == pytest.approx(float(best.acceptance), abs=EXACT)
    assert pooled.price == pytest.approx(float(best.price), rel=1e-8)
    assert pooled.target.shape == Q[0].shape and pooled.acceptance.shape == ()


def test_the_ends():
    lossless = float(torch.minimum(Q, P).sum(-1).mean())
    strict = ct.pooled_acceptance(Q, P, delta=0)
    assert (strict.price, strict.gap, strict.mean_divergence) == (math.inf, 0.0, 0.0)
    assert strict.mean_acceptance == pytest.approx(lossless, abs=EXACT)
    torch.testing.assert_close(strict.target, Q)
    for whole in (
        ct.pooled_acceptance(Q, P, delta=math.inf),
        ct.pooled_acceptance(Q, P, delta=50.0),
        ct.pooled_acceptance(Q, P, acceptance=1.0),
        ct.pooled_acceptance(Q, P, price=0.0),
    ):
        assert whole.price == 0 and whole.mean_acceptance == pytest.approx(1)
    same = ct.pooled_acceptance(Q, Q, delta=0.3)
    assert same.mean_acceptance == pytest.approx(1) and same.mean_divergence == 0
    low = ct.pooled_acceptance(Q, P, acceptance=lossless / 2)
    assert low.mean_divergence == 0 and low.mean_acceptance == pytest.approx(lossless)


def test_an_infinite_end_is_approached():
    q = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    best = ct.pooled_acceptance(q, p, divergence="reverse_kl", delta=20.0)
    assert best.mean_divergence == pytest.approx(20.0, abs=1e-9)
    assert 1 - 1e-8 < best.mean_acceptance < 1 and abs(best.gap) <= EXACT


@pytest.mark.parametrize("spec", some(POOLED, 4))
def test_the_frontier_is_concave_proven_and_spread(spec):
    line = ct.pooled_frontier(Q, P, divergence=spec, points=17)
    assert len(line.delta) == 17 and line.delta[0] == 0
    assert (line.delta.diff() >= 0).all() and (line.acceptance.diff() >= -EXACT).all()
    assert (line.price.diff() < 0).all()
    assert (line.bound - line.acceptance).abs().max() <= EXACT
    finite = torch.isfinite(line.delta)
    delta, accepted, price = line.delta[finite], line.acceptance[finite], line.price[finite]
    # tangents lie above: no point accepts more than another's slope allows
    above = accepted[1:, None] + price[1:, None] * (delta[None] - delta[1:, None])
    assert (above >= accepted[None] - EXACT).all()
    widest = float(line.acceptance.diff().max())
    assert widest <= 4 * float(line.acceptance[-1] - line.acceptance[0]) / 16
    middle = ct.pooled_acceptance(Q, P, divergence=spec, delta=float(delta[8]))
    assert middle.mean_acceptance == pytest.approx(float(accepted[8]), abs=EXACT)


def test_the_frontier_of_equal_rows_is_two_points():
    line = ct.pooled_frontier(Q, Q, points=9)
    assert line.acceptance.tolist() == pytest.approx([1.0] * len(line.acceptance))


def test_kinds_of_rows_are_kept():
    pooled = ct.pooled_acceptance(Q.float().numpy(), P.float().numpy(), delta=0.1)
    assert pooled.target.dtype == np.float32 and isinstance(pooled.acceptance, np.ndarray)
    assert isinstance(ct.pooled_frontier(Q.numpy(), P.numpy(), points=3).delta, np.ndarray)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"delta": 0.1, "divergence": "renyi:a=2"}, "f-divergence with a one-to-one price"),
        ({"delta": 0.1, "divergence": "total_variation"}, "f-divergence with a one-to-one price"),
        ({"delta": 0.1, "divergence": "max_divergence"}, "f-divergence with a one-to-one price"),
        ({"delta": -1}, r"delta: must lie in \[0, inf\]; got -1"),
        ({"acceptance": 1.0, "q": Q[:0], "p": P[:0]}, "target_probs: must hold a row"),
        ({"acceptance": 1.0, "q": [[1.0, 0]], "p": [[0.5, 0.5]]}, "must not exceed 0.5.*; got 1"),
    ],
)
def test_wrong_arguments_are_named(knobs, message):
    rows = knobs.get("q", Q), knobs.get("p", P)
    with pytest.raises(ValueError, match=message):
        ct.pooled_acceptance(*rows, **{name: own for name, own in knobs.items() if len(name) > 1})
    with pytest.raises(ValueError, match="points: must be a whole number of at least 2; got 2.5"):
        ct.pooled_frontier(Q, P, points=2.5)


def test_a_wrong_dual_is_noticed(monkeypatch):
    right = Geometry.bound
    monkeypatch.setattr(Geometry, "bound", lambda *args: right(*args) * 0.999)
    assert ct.pooled_acceptance(Q, P, delta=0.1).gap < -1e-4
