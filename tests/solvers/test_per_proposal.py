import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cactus_theory as ct
from cactus_theory.divergences import read_divergence
from solvers import per_proposal
from tests.solvers.cases import DIVERGENCES, LINEAR, Tally, budgets, examples, pairs

RAISED = 1e-6
PRICE = 1e-3
SMALLEST_PRICE = 1e-3


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
        assert abs(program.raised - raised) <= RAISED
        assert raised <= program.bound + 1e-9
        assert program.divergence <= delta + 1e-7
        assert program.target[token] == program.raised
        assert program.target.sum() == pytest.approx(1, abs=1e-12)
        price = slope_of_root(spec, q[token], delta)
        if spec not in LINEAR and price > SMALLEST_PRICE and raised < 1:
            assert abs(program.price / price - 1) <= PRICE

    agree()
    tally.check()


def slope_of_root(spec, q_n, delta):
    """Return dγ/dδ by central differences of the root, 0 where it has reached 1."""
    step = 1e-5 * delta
    ends = [exact(spec, q_n, delta + sign * step) for sign in (1, -1)]
    return 0.0 if ends[0] == 1 else (ends[0] - ends[1]) / (2 * step)


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
    roots = [exact(spec, x, 0.2) for x in q]
    np.testing.assert_allclose(ceiling, roots, rtol=1e-8)
