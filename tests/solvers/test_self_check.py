"""The programs must notice a wrong answer, whatever the solver says about it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cactus_theory.divergences import FDivergence, read_divergence
from solvers import (
    _attempts,
    _divergence_budget,
    _perspective,
    _row_program,
    block,
    decode,
    optimal,
    per_proposal,
    sequence,
)
from solvers._dual_bounds import Lagrangian, lagrange_bound
from solvers.design import Design
from tests.amounts import some
from tests.solvers.cases import DIVERGENCES, pairs, random_tree

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
CURVED = [kind(**kind.example).spec for kind in _perspective._FORMS]
GENERATORS = [spec for spec in DIVERGENCES if isinstance(read_divergence(spec), FDivergence)]
# of sums of a few float64 numbers
ROUNDING = 1e-9
BOTH, TREE = np.stack([Q, P, Q]), random_tree(3, 2, seed=2)
PROGRAMS = {
    "optimal": lambda spec: optimal.solve(Q, P, spec, delta=0.05),
    "per-proposal": lambda spec: per_proposal.solve(Q, 1, divergence=spec, delta=0.05),
    "sequence": lambda spec: sequence.solve(BOTH, BOTH[[1, 0, 0]], spec, delta=0.05),
    "design": lambda spec: Design(Q, P).cap(3.0).budget(spec, 0.05).solve(),
    "block": lambda spec: block.solve(TREE, spec, per_token=0.01),
    "decode": lambda spec: decode.solve(BOTH, BOTH[[1, 0, 0]], 2, spec, per_token=0.02),
}


@pytest.mark.parametrize("wrong", [0.8, 1.25], ids=["too loose", "too tight"])
@pytest.mark.parametrize("spec", some(CURVED, 2))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wrong_left_side_is_noticed(monkeypatch, program, spec, wrong):
    kind = type(read_divergence(spec))
    for forms in (_divergence_budget._LEFT_SIDES, _perspective._FORMS):
        if right := forms.get(kind):
            monkeypatch.setitem(forms, kind, lambda row, f, right=right: wrong * right(row, f))
    message = "exceed" if wrong < 1 else "misses its bound"
    with pytest.raises(_attempts.SolverGaveUp, match=message):
        PROGRAMS[program](spec)


@pytest.mark.parametrize("wrong", [0.9, 1.1])
@pytest.mark.parametrize("spec", ["renyi:a=2", "renyi:a=0.5"])
def test_a_wrong_power_sum_is_noticed(monkeypatch, spec, wrong):
    weights = _divergence_budget.power_weights
    monkeypatch.setattr(_divergence_budget, "power_weights", lambda row, a: wrong * weights(row, a))
    with pytest.raises(_attempts.SolverGaveUp):
        optimal.solve(Q, P, spec, delta=0.05)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_solver_without_an_answer_is_reported(monkeypatch, program):
    monkeypatch.setattr(_attempts, "believable", lambda *args: False)
    with pytest.raises(_attempts.SolverGaveUp, match="must .*CLARABEL: no answer"):
        PROGRAMS[program]("kl")


def test_a_failed_attempt_is_followed_by_a_rescaled_one(monkeypatch):
    attempt, scales = _row_program.RowProgram.attempt, []

    def fail_once(program, scale, solver):
        scales.append(scale)
        answer = attempt(program, scale, solver)
        return None if len(scales) == 1 else answer

    monkeypatch.setattr(_row_program.RowProgram, "attempt", fail_once)
    assert optimal.solve(Q, P, delta=0.05).gap < 1e-6
    assert len(scales) == 2
    np.testing.assert_array_equal(scales[1], Q)


@pytest.mark.parametrize("spec", some(DIVERGENCES, 6))
@given(pairs(), st.floats(0, 1), st.floats(0, 20), st.floats(-2, 2), st.integers(0, 2**32 - 1))
def test_no_row_beats_a_bound_at_any_multipliers(spec, rows, share, slope, level, seed):
    q, p = rows
    inside = q > 0
    q_in, p_in = q[inside], p[inside]
    noise = np.random.default_rng(seed).dirichlet(np.full(len(q_in), 0.5))
    h = (1 - share) * q_in + share * noise
    kind = read_divergence(spec)
    spent = float(kind.value(torch.from_numpy(h), torch.from_numpy(q_in)))
    if not np.isfinite(spent):
        return
    value = np.minimum(p_in, h).sum()
    for outside in ((), (0.3,)):
        bound = lagrange_bound(kind, q_in, p_in, spent, (slope, level), *outside)
        assert value <= bound + ROUNDING * (1 + abs(bound))


@given(pairs(), st.floats(0, 0.999), st.floats(0, 20), st.floats(-2, 2))
@pytest.mark.parametrize("spec", ["reverse_kl", "total_variation", "jensen_shannon", "renyi:a=0.5"])
def test_no_leaking_row_beats_a_bound_either(spec, rows, z, slope, level):
    q, p = rows
    q_in, p_in = q[q > 0], p[q > 0]
    kind = read_divergence(spec)
    spent = _row_program.divergence_of(kind, (1 - z) * q_in, q_in, z)
    value = np.minimum(p_in, (1 - z) * q_in).sum() + min(z, 0.3)
    bound = lagrange_bound(kind, q_in, p_in, spent, (slope, level), 0.3)
    assert value <= bound + ROUNDING * (1 + abs(bound))


@pytest.mark.parametrize("spec", GENERATORS)
def test_no_row_in_a_box_beats_a_bound(spec):
    noise = np.random.default_rng(4)
    q, p = noise.dirichlet(np.ones(6), size=2)
    kind, cost, tried = read_divergence(spec), np.linspace(-1, 2, 6), 0
    for row in 0.5 * q + 0.5 * noise.dirichlet(np.ones(6), size=400):
        if (row < 0.3 * q).any() or (row > 2.5 * q).any():
            continue
        tried += 1
        price, level, dear = noise.uniform(0, 2), noise.uniform(-1, 1), noise.uniform(0, 1)
        lagrangian = Lagrangian.of(q, p)
        lagrangian.narrow(0.3 * q, 2.5 * q)
        lagrangian.add_divergence(price, kind, _row_program.divergence_of(kind, row, q))
        lagrangian.add_linear(dear, cost, float(cost @ row))
        lagrangian.add_linear(level, 1.0, 1.0)
        assert np.minimum(p, row).sum() <= lagrangian.bound() + ROUNDING
    assert tried > 10


@pytest.mark.parametrize("level", [1.0, 2.0])
def test_a_multiplier_too_small_to_divide_by_still_proves_a_bound(level):
    one = np.ones(1)
    bound = lagrange_bound(read_divergence("reverse_kl"), one, one, 0.0, (5e-324, level), 0.3)
    assert 1 <= bound < np.inf
