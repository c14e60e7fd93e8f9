import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

import cactus_theory as ct
from cactus_theory.divergences import read_divergence
from solvers import per_proposal
from tests.solvers.cases import DIVERGENCES, LINEAR, Tally, budgets, examples, pairs

RAISED = 1e-6
PRICE = 1e-3
SMALLEST_PRICE = 1e-3


def raised_root(q_n, spec, delta):
    """Return the largest γ in [q_n, 1] of the two-point equation, by scipy's ``brentq``."""
    kind, target = read_divergence(spec), torch.tensor(q_n, dtype=torch.float64)
    if q_n in (0.0, 1.0) or delta == 0:
        return q_n
    if delta == math.inf:
        return 1.0
    amount = torch.tensor(delta, dtype=torch.float64)
    if kind.generator is None:
        return min(1.0, float(kind.ceiling(amount)) * q_n)
    budget = float(kind.to_generator(amount))

    def over(raised):
        raised = torch.tensor(raised, dtype=torch.float64)
        return float(kind.generator.two_points(raised, target)[0]) - budget

    top = 1.0 if math.isfinite(over(1.0)) else math.nextafter(1.0, 0.0)  # f(0) = ∞ forbids γ = 1
    if over(top) <= 0:
        return top
    # relative accuracy of a few ulps: four is the least that brentq accepts
    return optimize.brentq(over, q_n, top, xtol=1e-300, rtol=4 * np.finfo(float).eps)


def exact(spec, q_n, delta):
    rule = ct.policy("cactus_exact", delta=delta, divergence=spec)
    return float(rule.gamma(torch.tensor(q_n, dtype=torch.float64)))


@pytest.mark.parametrize("spec", DIVERGENCES)
def test_the_two_point_root_is_the_optimum_of_the_program(spec):
    tally = Tally()

    @examples(spec)
    @given(pairs(), budgets(), st.integers(0, 31))
    def agree(rows, delta, token):
        q, token = rows[0], token % len(rows[0])
        program = tally.solve(per_proposal.solve, q, token, divergence=spec, delta=delta)
        if program is None:
            return
        raised = exact(spec, q[token], delta)
        assert tally.record("raised", abs(program.raised - raised)) <= RAISED
        assert raised <= program.bound + 1e-9
        assert program.divergence <= delta + 1e-7
        assert program.target[token] == program.raised
        assert program.target.sum() == pytest.approx(1, abs=1e-12)
        price = slope_of_root(spec, q[token], delta)
        if spec not in LINEAR and price > SMALLEST_PRICE and raised < 1:
            assert tally.record("price", abs(program.price / price - 1)) <= PRICE

    agree()
    tally.check(spec)


def slope_of_root(spec, q_n, delta):
    """Return dγ/dδ by central differences of the root, 0 where it has reached 1."""
    step = 1e-5 * delta
    ends = [raised_root(q_n, spec, delta + sign * step) for sign in (1, -1)]
    return 0.0 if ends[0] == 1 else (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("spec", [spec for spec in DIVERGENCES if spec not in LINEAR])
def test_the_other_tokens_keep_their_proportions(spec):
    q = np.array([0.1, 0.2, 0.3, 0.4])
    target = per_proposal.solve(q, 1, divergence=spec, delta=0.1).target
    others = np.delete(target / q, 1)
    np.testing.assert_allclose(others, others.mean(), rtol=1e-4)


@pytest.mark.parametrize("spec", DIVERGENCES)
@given(st.floats(1e-4, 1 - 1e-4), budgets())
def test_the_root_is_the_policy_that_decodes(spec, q_n, delta):
    root = raised_root(q_n, spec, delta)
    assert root == pytest.approx(exact(spec, q_n, delta), rel=1e-12)


@given(st.floats(1e-4, 1 - 1e-4), budgets())
def test_the_published_rule_is_exact_for_pearson_at_twice_the_budget(q_n, delta):
    published = ct.policy("cactus", delta=delta).gamma(torch.tensor(q_n, dtype=torch.float64))
    root = raised_root(q_n, "pearson_chi2", 2 * delta)
    assert root == pytest.approx(float(published), rel=1e-12)


@pytest.mark.parametrize("spec", DIVERGENCES)
def test_ends_leave_the_target_alone(spec):
    q = np.array([0.0, 0.4, 0.6])
    impossible = per_proposal.solve(q, 0, divergence=spec, delta=0.5)
    assert (impossible.raised, impossible.price, impossible.solver) == (0.0, 0.0, "identity")
    deterministic = per_proposal.solve(np.array([0.0, 1.0]), 1, divergence=spec, delta=0.5)
    assert (deterministic.raised, deterministic.price) == (1.0, 0.0)
    strict = per_proposal.solve(q, 1, divergence=spec, delta=0)
    np.testing.assert_array_equal(strict.target, q)
    assert strict.price == {"total_variation": 1.0, "max_divergence": 0.4}.get(spec, math.inf)
    everything = per_proposal.solve(q, 1, divergence=spec, delta=math.inf)
    assert everything.raised == pytest.approx(1, abs=1e-9)
    assert everything.price == 0


@pytest.mark.parametrize("spec", DIVERGENCES)
def test_the_ceiling_is_just_above_the_root(spec):
    q = np.array([1e-4, 0.01, 0.3, 0.6899])
    ceiling = per_proposal.raised_ceiling(q, read_divergence(spec), 0.2)
    roots = [raised_root(x, spec, 0.2) for x in q]
    np.testing.assert_allclose(ceiling, roots, rtol=1e-8)
