import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import list_divergences
from cactus_theory.divergences.definition import examples
from tests.formulas import ALL, TEN, by_hand
from tests.rows import pair

# two float64 evaluations of a sum of a few dozen terms of order one
ROUNDING = 1e-12
# relative; a formula by hand cancels where the package does not, e.g. Σh^a q^(1−a) − 1
BY_HAND = 1e-9


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_every_example_is_listed():
    assert set(examples()) >= set(TEN)
    assert {spec.partition(":")[0] for spec in examples()} == set(list_divergences())


@pytest.mark.parametrize("spec", ALL)
def test_spec_round_trip(spec):
    kind = ct.divergence(spec)
    assert kind.spec == spec
    assert type(ct.divergence(kind.spec)) is type(kind)
    assert ct.divergence(kind) is kind


def test_orders_may_be_keywords():
    assert ct.divergence("renyi", a=2).spec == ct.divergence("renyi:a=2").spec


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("kinds", [("smooth", "smooth"), ("spiky", "smooth"), ("zeros", "zeros")])
def test_value_equals_the_formula_by_hand(spec, kinds):
    q, h = pair(20, 9, kinds=kinds)
    expected = by_hand(spec, h.numpy(), q.numpy())
    np.testing.assert_allclose(ct.divergence(spec).value(h, q), expected, rtol=BY_HAND, atol=1e-12)


def test_renyi_of_rows_that_share_almost_nothing():
    """What a rounded sum of 1 leaves of 1 may be an ulp, and an ulp is 73 nats."""
    torch.manual_seed(0)
    shares = torch.rand(500, 6, dtype=torch.float64)
    shares[:, 2] = 0
    h, q = shares / shares.sum(-1, keepdim=True), torch.eye(6, dtype=torch.float64)[2]
    assert (ct.divergence("renyi:a=0.5").value(h, q.expand_as(h)) == math.inf).all()
    h[:, 2] = 1e-40
    value = ct.divergence("renyi:a=0.5").value(h, q.expand_as(h))
    np.testing.assert_allclose(value, 40 * math.log(10), rtol=BY_HAND)


def test_a_row_with_nan_costs_nan_whatever_the_others_hold():
    target = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    emitted = torch.tensor([[0.5, 0.5, math.nan], [0.5, 0.5, 0.0]], dtype=torch.float64)
    for spec in ALL:
        values = ct.divergence(spec).value(emitted, target)
        assert values[0].isnan() and values[1] == 0, spec


def test_limits_of_the_orders():
    q, h = pair(20, 7)
    kl, reverse = ct.divergence("kl").value(h, q), ct.divergence("reverse_kl").value(h, q)
    for a in (1 - 1e-6, 1 + 1e-6):
        torch.testing.assert_close(ct.divergence("renyi", a=a).value(h, q), kl, rtol=1e-4, atol=0)
        torch.testing.assert_close(ct.divergence("alpha", a=a).value(h, q), kl, rtol=1e-4, atol=0)
    near = ct.divergence("alpha", a=1e-6).value(h, q)
    torch.testing.assert_close(near, reverse, rtol=1e-4, atol=0)
    most = ct.divergence("max_divergence").value(h, q)
    assert (ct.divergence("renyi:a=16").value(h, q) <= most + ROUNDING).all()


# what is left of the digits of terms whose ratios miss 1 by 1e-5
NEAR = 1e-8


@pytest.mark.parametrize("spread", [0.0, 1e-5, 1e-4, 0.1, 3.0])
def test_kl_of_long_rows_is_that_of_their_terms(spread):
    """Rows are long enough for one pass; some tokens have nothing in h, in q, in both."""
    source = np.random.default_rng(3)
    q = source.random((3, 5000)) ** 6
    h = q * np.exp(spread * source.normal(size=q.shape))
    h[1, :7], q[2, :5] = 0.0, 0.0
    h[2, :9] = 0.0
    q, h = (rows / rows.sum(-1, keepdims=True) for rows in (q, h))
    terms = [
        [
            (a * math.log1p((a - b) / b) - (a - b)) if a > 0 else b
            for a, b in zip(*rows, strict=True)
        ]
        for rows in zip(h.tolist(), q.tolist(), strict=True)
    ]
    expected = torch.tensor([math.fsum(row) for row in terms], dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 2), slice(None)):  # one that needs care changes no other
        found = ct.divergence("kl").value(torch.from_numpy(h[rows]), torch.from_numpy(q[rows]))
        torch.testing.assert_close(found, expected[rows], rtol=NEAR, atol=0.0)
    h[0, 0], q[0, 0] = 1e-9, 0.0
    costs = ct.divergence("kl").value(torch.from_numpy(h), torch.from_numpy(q))
    assert costs[0] == math.inf and bool(costs[1:].isfinite().all())
