"""The ends of the path, the special cases with a known answer, and bad input."""

import math

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.formulas import ALL, TEN
from tests.rows import pair

CLOSE = 1e-12
Q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
P = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def check_same(value, expected):
    torch.testing.assert_close(
        value, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=CLOSE
    )


def check_is_draft(s, q=Q, p=P):
    check_same(s.target, p)
    check_same(s.acceptance, 1.0)
    check_same(s.lower, (p / q).min())
    check_same(s.upper, (p / q).max())
    assert s.price == 0 and s.gap == 0


def check_is_target(s, spec="kl"):
    check_same(s.target, Q)
    check_same(s.acceptance, torch.minimum(P, Q).sum())
    assert s.divergence == 0 and s.gap == 0 and s.lower == 1 and s.upper == 1
    first = {"total_variation": 1.0, "max_divergence": Q[P > Q].sum().item()}
    assert s.price.item() == pytest.approx(first.get(spec, math.inf))


@pytest.mark.parametrize("spec", ALL)
def test_no_budget_is_the_target(spec):
    check_is_target(ct.optimal_acceptance(Q, P, divergence=spec, delta=0.0), spec)


@pytest.mark.parametrize("spec", ALL)
def test_slack_budgets_are_the_draft(spec):
    whole = ct.divergence(spec).value(P, Q).item()
    for delta in (whole * (1 + 1e-9), whole + 5, 1e300, math.inf):
        s = ct.optimal_acceptance(Q, P, divergence=spec, delta=delta)
        check_is_draft(s)
        assert s.divergence.item() == pytest.approx(whole)
    tight = ct.optimal_acceptance(Q, P, divergence=spec, delta=whole * 0.999)
    assert tight.acceptance < 1 - 1e-6 and tight.price > 0


@pytest.mark.parametrize("spec", ["kl", "reverse_kl", "jensen_shannon", "renyi:a=0.5"])
def test_prices_at_the_ends(spec):
    kind, ends = ct.divergence(spec), (P / Q).aminmax()
    slopes = kind.generator.slope(ends.max) - kind.generator.slope(ends.min)
    at_end = kind.price_from_generator(1 / slopes, kind.value(P, Q)).item()
    for price in (0.0, at_end / 2, at_end):
        check_is_draft(ct.optimal_acceptance(Q, P, divergence=spec, price=price))
    inside = ct.optimal_acceptance(Q, P, divergence=spec, price=at_end * 1.01)
    assert inside.acceptance < 1 - 1e-4
    assert inside.price.item() == pytest.approx(at_end * 1.01)
    check_is_target(ct.optimal_acceptance(Q, P, divergence=spec, price=math.inf))


def test_acceptances_at_the_ends():
    check_is_draft(ct.optimal_acceptance(Q, P, acceptance=1.0))
    lossless = torch.minimum(P, Q).sum().item()
    for wish in (0.0, lossless / 2):
        check_is_target(ct.optimal_acceptance(Q, P, acceptance=wish))


def test_equal_rows_and_one_token():
    for spec in ALL:
        for delta in (0.0, 0.1, math.inf):
            equal = ct.optimal_acceptance(Q, Q, divergence=spec, delta=delta)
            check_same(equal.target, Q)
            check_same(equal.acceptance, 1.0)
            assert equal.divergence <= 1e-15 and equal.gap.abs() <= CLOSE
            one = ct.optimal_acceptance(tensor(1.0), tensor(1.0), divergence=spec, delta=delta)
            assert one.target.tolist() == [1.0] and one.acceptance == 1


@pytest.mark.parametrize("spec", TEN)
def test_a_ratio_that_overflows_is_a_zero(spec):
    q, p = tensor(0.6, 0.4, 1e-320), tensor(0.3, 0.2, 0.5)
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=0.1)
    z = ct.optimal_acceptance(tensor(0.6, 0.4, 0.0), p, divergence=spec, delta=0.1)
    for field in vars(s):
        check_same(getattr(s, field), getattr(z, field))


@pytest.mark.parametrize("spec", TEN)
def test_nothing_in_common(spec):
    q, p = tensor(0.6, 0.4, 0.0), tensor(0.0, 0.0, 1.0)
    s = ct.optimal_acceptance(q, p, divergence=spec, delta=0.1)
    check_same(s.target, q)
    check_same(s.acceptance, 0.0)


@pytest.mark.parametrize("spec", TEN)
def test_a_deterministic_draft_is_the_per_proposal_program(spec):
    q, _ = pair(7, 7, seed=2)
    deterministic = torch.eye(7, dtype=torch.float64)
    for delta in (0.01, 0.3):
        s = ct.optimal_acceptance(q, deterministic, divergence=spec, delta=delta)
        raised = ct.policy("cactus_exact", delta=delta, divergence=spec).gamma(q.diagonal())
        torch.testing.assert_close(s.acceptance, raised, rtol=0, atol=1e-9)


GOOD = {"target_probs": [0.5, 0.5], "draft_probs": [0.25, 0.75], "delta": 0.1}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"delta": None}, ValueError, "delta, price, acceptance: exactly one .*; got none"),
        ({"price": 1.0}, ValueError, "exactly one must be given; got delta and price"),
        ({"delta": -0.1}, ValueError, r"delta: must lie in \[0, inf\]; got -0.1"),
        ({"delta": math.nan}, ValueError, "delta: must lie in .*; got nan"),
        ({"delta": "x"}, ValueError, "delta: must be a number or an array of numbers; got 'x'"),
        ({"delta": [0.1, 0.2]}, ValueError, r"delta: must broadcast .* \(\); got shape \(2,\)"),
        ({"delta": None, "acceptance": 1.1}, ValueError, r"acceptance: must lie in \[0, 1\]; got"),
        ({"divergence": "x"}, ValueError, "divergence: must be one of .*; got 'x'"),
        ({"support": "x"}, ValueError, "support: must be one of target, free; got 'x'"),
        ({"target_probs": [0.5, 0.6]}, ValueError, "target_probs: every row must sum .* to 1.1"),
        ({"draft_probs": [1.5, -0.5]}, ValueError, "draft_probs: .* not be negative; got -0.5"),
        ({"draft_probs": [math.nan, 1]}, ValueError, "draft_probs: .* finite; got nan at token 0"),
        ({"draft_probs": [math.inf, 1]}, ValueError, "draft_probs: .* finite; got inf at token 0"),
        ({"draft_probs": [1.0]}, ValueError, r"draft_probs: vocabulary .* \(2 tokens\); got 1"),
        ({"draft_probs": [[1.0], [0.5, 0.5]]}, ValueError, "draft_probs: rows must have equal"),
        ({"target_probs": 1.0}, ValueError, r"target_probs: needs a last axis.*shape \(\)"),
        ({"target_probs": ["a", "b"]}, TypeError, "target_probs: must hold floats; got dtype"),
        ({"draft_probs": np.ones(2, np.int64)}, TypeError, "draft_probs: must hold floats"),
        ({"target_probs": np.full((3, 2), 0.5), "draft_probs": np.full((2, 2), 0.5)}, ValueError,
         r"draft_probs: shape must broadcast .* \(3, 2\); got"),
        ({"delta": None, "acceptance": 0.8, "target_probs": [1.0, 0.0], "draft_probs": [0.7, 0.3]},
         ValueError, "acceptance: must not exceed 0.7.*; got 0.8"),
        *(({"delta": None, "price": 1.0, "divergence": spec}, ValueError,
           f"price: {spec} has no one-to-one price; .* got 1.0")
          for spec in ("total_variation", "renyi:a=2", "max_divergence")),
    ],
)  # fmt: skip
def test_bad_input_is_named(wrong, error, message):
    arguments = {**GOOD, **wrong}
    rows = arguments.pop("target_probs"), arguments.pop("draft_probs")
    with pytest.raises(error, match=message):
        ct.optimal_acceptance(*rows, **arguments)


FIRST_GAINS = {
    # target, draft, what the first bit of divergence can buy
    "nothing": (tensor(0.6, 0.4, 0.0), tensor(0.6, 0.4, 0.0)),
    "only a leak": (tensor(0.6, 0.4, 0.0), tensor(0.5, 0.3, 0.2)),
    "a raised token": (tensor(0.6, 0.4, 0.0), tensor(0.3, 0.5, 0.2)),
}


@pytest.mark.parametrize("support", ["target", "free"])
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("case", FIRST_GAINS)
def test_price_of_the_first_bit(case, spec, support):
    q, p = FIRST_GAINS[case]
    kind = ct.divergence(spec)
    price = ct.optimal_acceptance(q, p, divergence=spec, delta=0.0, support=support).price
    leaks = support == "free" and math.isfinite(getattr(kind, "slope_at_infinity", math.inf))
    if case == "a raised token":
        flat = {"total_variation": 1.0, "max_divergence": 0.4}
        assert price.item() == pytest.approx(flat.get(spec, math.inf))
    elif case == "nothing" or (not leaks and "renyi" not in spec):
        assert price == 0
    else:
        step = 1e-6
        further = ct.optimal_acceptance(q, p, divergence=spec, delta=step, support=support)
        assert price.item() == pytest.approx((further.acceptance.item() - 0.8) / step, rel=5e-3)


@pytest.mark.parametrize(
    "spec", ["pearson_chi2", "renyi:a=2", "renyi:a=5", "alpha:a=3", "max_divergence", "kl"]
)
@pytest.mark.parametrize("least", [1e-30, 1e-150, 1e-305])
def test_tokens_that_can_gain_less_than_an_ulp(spec, least):
    """There the row may stay the target's, and is proven all the same."""
    q, p = (torch.tensor(row, dtype=torch.float64) for row in ([1.0, least], [0.3333, 0.6667]))
    best = ct.optimal_acceptance(q, p, divergence=spec, delta=0.1)
    assert abs(float(best.gap)) <= 1e-12 and float(best.acceptance) >= 0.3333
    assert float(best.divergence) <= 0.1 * (1 + 1e-9) or spec == "max_divergence"
    if spec == "max_divergence":
        assert float(best.upper) == pytest.approx(math.exp(0.1), rel=1e-15)
    assert float(best.target.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("spec", ALL)
def test_a_budget_below_rounding_leaves_ordinary_rows_lossless(spec):
    """There f(b) is all rounding close to 1: no edge may be read off it."""
    s = ct.optimal_acceptance(Q, P, divergence=spec, delta=1e-40)
    torch.testing.assert_close(s.target, Q, rtol=0, atol=1e-7)
    assert s.divergence <= 1e-14 and s.gap.abs() <= 1e-14
    check_same(s.target.sum(), 1.0)


def test_no_gradient_flows():
    q, p = Q.clone().requires_grad_(), P.clone().requires_grad_()
    rule = ct.policy("cactus_exact:delta=0.1")
    s, report = ct.optimal_acceptance(q, p, delta=0.1), ct.audit(rule, q, p)
    pooled = ct.pooled_acceptance(q[None], p[None], delta=0.1)
    law, spent = ct.emitted_law(rule, q, p), ct.divergence("kl").value(p, q)
    made = s.acceptance, s.upper, report.spent, *report.divergences.values(), pooled.acceptance
    assert not any(part.requires_grad for part in (*made, pooled.target, law, spent))


def test_inference_mode_and_back():
    outside = ct.optimal_acceptance(Q, P, delta=0.1)
    with torch.inference_mode():
        inside = ct.optimal_acceptance(Q, P, delta=0.1)
    assert torch.equal(inside.target, outside.target)
    assert torch.equal(ct.optimal_acceptance(Q, P, delta=0.1).target, outside.target)
