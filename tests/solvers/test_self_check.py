"""The programs must notice a wrong answer, whatever the solver says about it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cactus_theory.divergences import divergence
from solvers import (
    _conic,
    _perspective,
    _program,
    optimal,
    per_proposal,
)
from solvers._dual import lagrange_bound
from tests.amounts import some
from tests.solvers.cases import DIVERGENCES, pairs

Q, P = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
CURVED = [kind(**kind.example).spec for kind in _perspective._FORMS]


@pytest.mark.parametrize("wrong", [0.9, 1.1], ids=["too loose", "too tight"])
@pytest.mark.parametrize("spec", some(CURVED, 4))
def test_a_wrong_left_side_is_noticed(monkeypatch, spec, wrong):
    kind = type(divergence(spec))
    forms = next(table for table in (_conic._LEFT_SIDES, _perspective._FORMS) if kind in table)
    right = forms[kind]
    monkeypatch.setitem(forms, kind, lambda row, f: wrong * right(row, f))
    message = "exceeds" if wrong < 1 else "misses its bound"
    with pytest.raises(_program.SolverGaveUp, match=message):
        optimal.solve(Q, P, spec, delta=0.05)
    with pytest.raises(RuntimeError, match=message):
        per_proposal.solve(Q, 1, divergence=spec, delta=0.05)


@pytest.mark.parametrize("wrong", [0.9, 1.1])
@pytest.mark.parametrize("spec", ["renyi:a=2", "renyi:a=0.5"])
def test_a_wrong_power_sum_is_noticed(monkeypatch, spec, wrong):
    weights = _conic.power_weights
    monkeypatch.setattr(_conic, "power_weights", lambda row, a: wrong * weights(row, a))
    with pytest.raises(_program.SolverGaveUp):
        optimal.solve(Q, P, spec, delta=0.05)


def test_a_solver_without_an_answer_is_reported(monkeypatch):
    monkeypatch.setattr(_program, "believable", lambda *args: False)
    with pytest.raises(_program.SolverGaveUp, match="CLARABEL: no answer"):
        optimal.solve(Q, P, delta=0.05)


def test_a_failed_attempt_is_followed_by_a_rescaled_one(monkeypatch):
    attempt, scales = _program.Program.attempt, []

    def fail_once(program, scale, solver):
        scales.append(scale)
        answer = attempt(program, scale, solver)
        return None if len(scales) == 1 else answer

    monkeypatch.setattr(_program.Program, "attempt", fail_once)
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
    kind = divergence(spec)
    spent = float(kind.value(torch.from_numpy(h), torch.from_numpy(q_in)))
    if not np.isfinite(spent):
        return
    value = np.minimum(p_in, h).sum()
    bound = lagrange_bound(kind, q_in, p_in, spent, (slope, level))
    assert value <= bound + 1e-9 * (1 + abs(bound))
    bound = lagrange_bound(kind, q_in, p_in, spent, (slope, level), 0.3)
    assert value <= bound + 1e-9 * (1 + abs(bound))


@given(pairs(), st.floats(0, 0.999), st.floats(0, 20), st.floats(-2, 2))
@pytest.mark.parametrize("spec", ["reverse_kl", "total_variation", "jensen_shannon", "renyi:a=0.5"])
def test_no_leaking_row_beats_a_bound_either(spec, rows, z, slope, level):
    q, p = rows
    q_in, p_in = q[q > 0], p[q > 0]
    kind = divergence(spec)
    spent = _program.divergence_of(kind, (1 - z) * q_in, q_in, z)
    value = np.minimum(p_in, (1 - z) * q_in).sum() + min(z, 0.3)
    bound = lagrange_bound(kind, q_in, p_in, spent, (slope, level), 0.3)
    assert value <= bound + 1e-9 * (1 + abs(bound))


@pytest.mark.parametrize("level", [1.0, 2.0])
def test_a_multiplier_too_small_to_divide_by_still_proves_a_bound(level):
    one = np.ones(1)
    bound = lagrange_bound(divergence("reverse_kl"), one, one, 0.0, (5e-324, level), 0.3)
    assert 1 <= bound < np.inf
