"""A plain function becomes a policy: its knobs, its promises, its recovery."""

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.policies import FixedTarget
from tests.rows import pair

CLOSE = {"rtol": 0, "atol": 1e-12}


@ct.rule(budget="max_divergence <= delta per proposal", direction=1, strict=0.0)
def lenient(q, p, n, *, delta=0.5):
    """Keep with e^δ q/p."""
    return min(1, np.exp(delta) * q[n] / p[n])


@ct.rule(arrays="torch")
def half(q, p):
    return (q + p) / 2


def test_a_function_of_three_equals_the_policy_it_describes():
    q, p = pair(6, 5, seed=1)
    plain = ct.rule(lambda q, p, n: min(1, q[n] / p[n]))
    known = ct.policy("speculative")
    torch.testing.assert_close(plain.keep(q, p), known.keep(q, p), **CLOSE)
    torch.testing.assert_close(ct.emitted_law(plain, q, p), q, **CLOSE)
    n = torch.tensor([0, 1, 2, 3, 4, 0])
    torch.testing.assert_close(plain.recovery(q, p, n), known.recovery(q, p, n), **CLOSE)
    torch.testing.assert_close(
        plain.acceptance(q, None, n[:, None]), known.acceptance(q, None, n[:, None]), **CLOSE
    )


def test_a_function_of_two_is_a_fixed_target():
    assert isinstance(half, FixedTarget)
    q, p = pair(2, 3, 5, seed=2)
    torch.testing.assert_close(ct.emitted_law(half, q, p), (q + p) / 2, **CLOSE)
    report = ct.audit(half, q, p)
    assert report.policy == "half"
    torch.testing.assert_close(report.acceptance, torch.minimum(p, (q + p) / 2).sum(-1), **CLOSE)


def test_functions_go_through_the_verifier():
    q, p = pair(1, 4, seed=3)
    ids = torch.tensor([[1]])
    for rule in (lenient, half):
        verdict = ct.verify_chain(
            rule, q.expand(1, 2, 4), p[None], ids, generator=torch.Generator().manual_seed(0)
        )
        assert verdict.output_token_ids.shape == (1, 2)


def test_a_recovery_of_its_own_is_asked_where_a_token_can_be_rejected():
    asked = []

    def recovery(q, p, n):
        asked.append((q.tolist(), n))
        return np.eye(len(q))[q.argmax()]

    rule = ct.rule(lambda q, p, n: min(1, q[n] / p[n]), recovery=recovery)
    q = torch.tensor([[0.2, 0.8], [0.2, 0.8]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5], [0.1, 0.9]], dtype=torch.float64)
    g = rule.recovery(q, p, torch.tensor([0, 0]))
    assert g.tolist() == [[0.0, 1.0], [0.2, 0.8]]  # nothing to reject in the second row
    assert asked == [([0.2, 0.8], 0)]


def test_tokens_that_cannot_be_drafted_are_not_asked_for():
    def division(q, p, n):
        return min(1.0, float(q[n]) / float(p[n]))

    q, p = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    assert ct.rule(division).keep(q, p).tolist() == [0.5, 1.0, 0.0]


def test_knobs_and_promises():
    assert lenient.spec == "lenient:delta=0.5" and lenient.knob == "delta"
    budget = lenient.declares.budget
    assert (budget.divergence, budget.amount, budget.scope) == (
        "max_divergence",
        0.5,
        "per proposal",
    )
    other = lenient.with_knobs(delta=0.1)
    assert other.declares.budget.amount == 0.1 and lenient.declares.budget.amount == 0.5
    q, p = np.array([0.2, 0.8]), np.array([0.9, 0.1])
    assert other(q, p, 0) == pytest.approx(np.exp(0.1) * 0.2 / 0.9)
    assert other.keep(*map(torch.from_numpy, (q, p)))[0].item() == other(q, p, 0)
    assert other.declares.direction == 1 and other.declares.strict == 0.0


def test_rows_keep_their_dtype_on_the_way_in():
    seen = []
    rule = ct.rule(lambda q, p, n: seen.append((q.dtype, p.dtype)) or 0.5)
    q, p = (row.float() for row in pair(1, 3))
    rule.acceptance(q, p, torch.tensor([[0]]))
    rule.acceptance(q, None, torch.tensor([[0]]))
    assert set(seen) == {(np.dtype("float32"),) * 2}


def one_argument(q):
    return q


def two_numbers(q, p, n):
    return q[:2]


def knob_without_default(q, p, n, *, delta):
    return delta


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ct.rule(one_argument), TypeError, r"must take \(q, p, n\) or \(q, p\)"),
        (lambda: ct.rule(knob_without_default), ValueError, "the knob delta needs a default value"),
        (
            lambda: ct.rule(lenient.source.function, knob="x"),
            ValueError,
            "knob: must be one of delta",
        ),
        (
            lambda: ct.rule(lenient.source.function, fast=True),
            TypeError,
            "declares one of .*'fast'",
        ),
        (lambda: ct.rule(one_argument, arrays="jax"), ValueError, "arrays: must be one of"),
        (lambda: ct.rule(lenient.source.function, budget="kl"), ValueError, "budget: must read"),
        (
            lambda: ct.rule(lenient.source.function, budget="kl <= x emitted"),
            ValueError,
            "budget: must be a number; got 'x'",
        ),
        (
            lambda: ct.rule(half.source.function, recovery=two_numbers),
            TypeError,
            "recovery: follows from the target row",
        ),
        (lambda: lenient.with_knobs(x=1), ValueError, "knob: must be one of delta; got 'x'"),
        (
            lambda: ct.rule(two_numbers).keep(*pair(1, 3)),
            ValueError,
            r"two_numbers: must return one number; got shape \(2,\)",
        ),
    ],
)
def test_what_cannot_be_read_is_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
