import math

import numpy as np
import pytest
import torch
from hypothesis import given

import cactus_theory as ct
from cactus_theory.divergences import Divergence, FDivergence, divergences
from cactus_theory.divergences.definition import examples
from cactus_theory.testing import strategies
from tests.formulas import ALL, TEN, by_hand
from tests.rows import KINDS, pair

# whatever is registered, whether or not it has a formula by hand
EVERY = tuple(dict.fromkeys((*ALL, *examples())))
GENERATORS = tuple(spec for spec in EVERY if isinstance(ct.divergence(spec), FDivergence))
SMOOTH = tuple(spec for spec in GENERATORS if ct.divergence(spec).smooth)

# two float64 evaluations of a sum of a few dozen terms of order one
ROUNDING = 1e-12
# relative; a formula by hand cancels where the package does not, e.g. Σh^a q^(1−a) − 1
BY_HAND = 1e-9
# an end of the range stands in for the limit
LIMIT = 1e-4


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_every_example_is_listed():
    assert set(examples()) >= set(TEN)
    assert {spec.partition(":")[0] for spec in examples()} == set(divergences())


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


@given(rows=strategies.pairs(max_vocab=6))
def test_value_is_a_divergence(rows):
    q, h = rows
    for spec in ALL:
        kind = ct.divergence(spec)
        value = kind.value(h, q)
        assert value.dtype == torch.float64 and value.shape == ()
        assert value >= -ROUNDING, spec  # +inf included, NaN not
        assert kind.value(q, q).abs() <= ROUNDING, spec


@pytest.mark.parametrize("spec", GENERATORS)
def test_generator_is_zero_at_one_and_convex(spec):
    kind = ct.divergence(spec)
    t = torch.logspace(-6, 6, 400, dtype=torch.float64)
    assert kind.f(tensor(1.0)).abs() <= ROUNDING
    assert (kind.centred(t) >= -ROUNDING).all()
    assert (kind.slope(t).diff() >= -ROUNDING).all()


@pytest.mark.parametrize("spec", GENERATORS)
def test_slope_is_the_derivative(spec):
    kind = ct.divergence(spec)
    t = tensor(0.01, 0.3, 0.9, 1.2, 3.0, 40.0).requires_grad_()
    (derivative,) = torch.autograd.grad(kind.f(t).sum(), t)
    torch.testing.assert_close(kind.slope(t.detach()), derivative, rtol=1e-10, atol=1e-12)
    step = 1e-5 * t.detach()  # central differences, without autograd
    rise = (kind.f(t.detach() + step) - kind.f(t.detach() - step)) / (2 * step)
    torch.testing.assert_close(kind.slope(t.detach()), rise, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("spec", SMOOTH)
def test_slope_inverse_undoes_slope(spec):
    kind = ct.divergence(spec)
    t = tensor(1e-3, 0.3, 1.0, 1.7, 50.0)
    torch.testing.assert_close(kind.slope_inverse(kind.slope(t)), t, rtol=1e-9, atol=0)
    assert kind.slope(tensor(1.0)).item() == pytest.approx(kind.slope_at_one, abs=ROUNDING)


@pytest.mark.parametrize("spec", SMOOTH)
def test_curvature_is_the_derivative_of_the_slope(spec):
    kind = ct.divergence(spec)
    t = tensor(0.01, 0.3, 0.9, 1.2, 3.0, 40.0)
    by_difference = FDivergence.curvature(kind, t)
    torch.testing.assert_close(kind.curvature(t), by_difference, rtol=1e-7, atol=0)
    assert (kind.curvature(t) > 0).all() and kind.kink == 0


@pytest.mark.parametrize("spec", SMOOTH)
def test_ratios_beyond_the_range_of_the_slope(spec):
    kind = ct.divergence(spec)
    t = tensor(1e-3, 0.3, 1.0, 1.7, 50.0)
    torch.testing.assert_close(kind.ratio_at(kind.slope(t)), t, rtol=1e-9, atol=0)
    low, high = kind.slope(tensor(0.0)).item(), kind.slope_at_infinity
    if math.isfinite(low):
        assert kind.ratio_at(tensor(low, low - 1)).tolist() == [0.0, 0.0]
    if math.isfinite(high):
        assert kind.ratio_at(tensor(high, high + 1)).tolist() == [math.inf, math.inf]


def test_a_kink_is_how_much_the_slope_jumps():
    kind = ct.divergence("total_variation")
    below, above = kind.slope(tensor(1 - 1e-9, 1 + 1e-9)).tolist()
    assert kind.kink == above - below and kind.slope_at_one == (above + below) / 2


@pytest.mark.parametrize("spec", GENERATORS)
def test_two_points_are_a_row_of_two_tokens(spec):
    kind = ct.divergence(spec)
    raised, q_n = tensor(0.3, 0.8), tensor(0.2, 0.5)
    value, slope = kind.two_points(raised, q_n)
    rows = (torch.stack([x, 1 - x], -1) for x in (raised, q_n))
    torch.testing.assert_close(value, kind.value(*rows))
    step = 1e-6
    rise = kind.two_points(raised + step, q_n)[0] - kind.two_points(raised - step, q_n)[0]
    torch.testing.assert_close(slope, rise / (2 * step), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("spec", EVERY)
def test_geometry(spec):
    """Budgets translate both ways, prices by the derivative; or there is a ceiling."""
    kind = ct.divergence(spec)
    delta = tensor(0.01, 0.1, 0.4)
    if kind.generator is None:
        ceiling, step = kind.ceiling(delta), 1e-6
        torch.testing.assert_close(kind.from_ceiling(ceiling), delta)
        rise = (kind.ceiling(delta + step) - kind.ceiling(delta - step)) / (2 * step)
        torch.testing.assert_close(kind.ceiling_slope(ceiling), rise)
        return
    torch.testing.assert_close(kind.from_generator(kind.to_generator(delta)), delta)
    step = 1e-6
    rise = (kind.to_generator(delta + step) - kind.to_generator(delta - step)) / (2 * step)
    torch.testing.assert_close(
        kind.price_from_generator(torch.full_like(delta, 2.0), delta), 2 * rise
    )
    assert kind.additive == (kind.generator is kind)


@pytest.mark.parametrize("spec", GENERATORS)
def test_ends_of_the_generator(spec):
    kind = ct.divergence(spec)
    at_zero, far = kind.f(tensor(0.0)), kind.slope(tensor(1e12))
    if math.isinf(kind.at_zero):
        assert kind.f(tensor(1e-300)) > 100
    else:
        assert at_zero.item() == pytest.approx(kind.at_zero, abs=ROUNDING)
    if math.isinf(kind.slope_at_infinity):
        assert far > 20
    else:
        assert far.item() == pytest.approx(kind.slope_at_infinity, abs=LIMIT)


@pytest.mark.parametrize("spec", GENERATORS)
def test_mass_where_the_target_has_none_costs_the_slope_at_infinity(spec):
    kind = ct.divergence(spec)
    q, h = tensor(0.5, 0.5, 0.0), tensor(0.3, 0.4, 0.3)
    inner = (q * kind.f(h / q))[:2].sum()
    assert kind.value(h, q).item() == pytest.approx((inner + 0.3 * kind.slope_at_infinity).item())


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_contains_pearson_hellinger_and_neyman(kind):
    q, h = pair(20, 7, kinds=(kind, "smooth"))
    value = lambda spec: ct.divergence(spec).value(h, q)  # noqa: E731
    torch.testing.assert_close(value("alpha:a=2"), value("pearson_chi2") / 2)
    torch.testing.assert_close(value("alpha:a=0.5"), value("squared_hellinger") * 2)
    torch.testing.assert_close(value("alpha:a=-1"), value("neyman_chi2") / 2)


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


@pytest.mark.parametrize("a", [0.3, 2.0, 5.0])
def test_renyi_budgets_translate_both_ways(a):
    kind = ct.divergence("renyi", a=a)
    delta = tensor(0.0, 1e-9, 0.1, 1.0)
    torch.testing.assert_close(
        kind.from_generator(kind.to_generator(delta)), delta, rtol=1e-9, atol=1e-15
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "divergence: must be one of kl, .*; got 'nothing'"),
        (("kl:a=2",), "divergence: kl takes no knobs; got 'kl:a=2'"),
        (("alpha",), "divergence: alpha needs exactly the knob a; got 'alpha'"),
        (("alpha:a",), "spec: knobs must read knob=value; got 'a' in 'alpha:a'"),
        (("alpha:a=1",), "a: must not be 0 or 1 .*; got '1'"),
        (("alpha:a=0",), "a: must not be 0 or 1 .*; got '0'"),
        (("alpha:a=17",), r"a: must lie in \[-16, 16\]; got '17'"),
        (("alpha:a=nan",), "a: must lie in .*; got 'nan'"),
        (("renyi:a=1",), "a: must not be 1 .*; got '1'"),
        (("renyi:a=0",), r"a: must lie in \(0, 16\]; got '0'"),
        (("renyi:a=x",), "a: must be a number; got 'x'"),
    ],
)
def test_bad_specs_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ct.divergence(*arguments)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="divergence: must be a spec string or a Divergence; got 3"):
        ct.divergence(3)
    with pytest.raises(ValueError, match="no inverse slope"):
        ct.divergence("total_variation").slope_inverse(tensor(0.1))
    with pytest.raises(NotImplementedError):
        Divergence().value(tensor(1.0), tensor(1.0))
