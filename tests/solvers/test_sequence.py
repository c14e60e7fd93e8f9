"""One budget over many positions: the dual, the program and a band of constant price agree."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import cactus_theory as ct
from cactus_theory.divergences.classical import KL
from cactus_theory.traces import Trace
from solvers import _perspective, _program, optimal, sequence
from tests.amounts import THOROUGH, amount, some
from tests.solvers.cases import DIVERGENCES, pairs

VALUE = 1e-6
PRICE = 1e-3
# of sums of a few hundred float64 terms, by roots solved to 1e-13
EXACT = 1e-10
TRACE = Path(__file__).parents[2] / "simulations" / "data" / "trace"
SUMMED = tuple(s for s in DIVERGENCES if not s.startswith(("renyi", "max")))
PRICED = tuple(s for s in SUMMED if s != "total_variation")
EXAMPLES = amount(3, 100)


def batches():
    """Return lists of pairs padded with zeros to one vocabulary, as two arrays."""
    return st.lists(pairs(), min_size=1, max_size=4).map(_stacked)


def _stacked(rows):
    width = max(len(q) for q, _ in rows)
    return tuple(
        np.stack([np.pad(row[side], (0, width - len(row[side]))) for row in rows])
        for side in (0, 1)
    )


def band(spec, q, p, price):
    return ct.optimal_acceptance(q, p, divergence=spec, price=price)


def constant_price(spec, q, p, delta):
    """Return the bands of the one price at which they spend ``delta`` together."""

    def over(log):
        return band(spec, q, p, math.exp(log)).divergence.sum() - delta

    if over(-12.0) <= 0:
        return band(spec, q, p, 0.0)
    return band(spec, q, p, math.exp(brentq(over, -12.0, 12.0, xtol=1e-9)))


@pytest.mark.parametrize("spec", some(PRICED, 3))
@settings(max_examples=EXAMPLES)
@given(batches(), st.floats(0.02, 1.0))
def test_the_best_split_pays_one_price_everywhere(spec, rows, delta):
    q, p = rows
    try:
        program = sequence.program(q, p, spec, delta=delta)
    except _program.SolverGaveUp:
        pytest.fail(f"{spec} gave up")
    dual = sequence.solve(q, p, spec, delta=delta)
    assert dual.solver == "lagrange dual" and abs(dual.gap) <= EXACT
    assert dual.total_divergence <= delta + EXACT
    assert dual.total_acceptance == pytest.approx(program.total_acceptance, abs=VALUE)
    bands = constant_price(spec, q, p, delta)
    assert program.total_acceptance == pytest.approx(bands.acceptance.sum(), abs=VALUE)
    assert program.total_divergence <= delta + 1e-7
    assert abs(program.gap) <= VALUE
    assert program.target.sum(-1) == pytest.approx(np.ones(len(q)), abs=1e-12)
    assert not program.target[q == 0].any()
    price = bands.price.max()
    if price > 1e-3 and bands.divergence.sum() > delta - 1e-7:
        assert program.price == pytest.approx(price, rel=PRICE)
        np.testing.assert_allclose(program.divergence, bands.divergence, atol=1e-3)


@pytest.mark.parametrize("spec", ["kl", "reverse_kl"])
def test_a_certain_draft_at_one_position_leaves_the_others_their_reward(spec):
    q = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    p = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]])
    program = sequence.program(q, p, spec, delta=0.01)
    alone = sequence.program(q[1:], p[1:], spec, delta=0.01)
    assert program.total_acceptance == pytest.approx(1 + alone.total_acceptance, abs=VALUE)


def test_a_small_price_of_the_program_has_its_digits():
    """Read off the first answer, whose bound is tight to 6e-10, it is .2 % off."""
    q, p = np.array([[3.34145418e-4, 3.5924018e-3, 0.9960734527]]), np.array([[0.0, 7e-4, 0.9993]])
    q, p = (row / row.sum() for row in (q, p))
    dual = sequence.solve(q, p, "neyman_chi2", delta=0.02)
    assert 1e-3 < dual.price < 2e-3 and dual.total_divergence <= 0.02 + EXACT
    program = sequence.program(q, p, "neyman_chi2", delta=0.02)
    assert program.price == pytest.approx(dual.price, rel=PRICE)


def test_ten_real_sized_positions():
    noise = np.random.default_rng(5)
    q, p = (noise.dirichlet(np.full(64, 0.5), size=10) + 1e-6 for _ in range(2))
    q, p = (rows / rows.sum(-1, keepdims=True) for rows in (q, p))
    program = sequence.solve(q, p, delta=1.0)
    bands = constant_price("kl", q, p, 1.0)
    assert program.total_divergence == pytest.approx(1.0, abs=1e-6)
    assert bands.divergence.sum() == pytest.approx(1.0, abs=1e-7)
    assert program.total_acceptance == pytest.approx(bands.acceptance.sum(), abs=VALUE)
    assert program.price == pytest.approx(bands.price[0], rel=PRICE)
    even = ct.optimal_acceptance(q, p, delta=0.1).acceptance.sum()
    assert program.total_acceptance > even + 1e-3


@pytest.mark.parametrize("rows", [8, 40, 272] if THOROUGH else [8, 40])
@pytest.mark.parametrize("spec", PRICED if THOROUGH else ["kl", "reverse_kl"])
def test_real_rows_at_any_size(spec, rows):
    q, p = (part[:rows].numpy() for part in Trace.open(TRACE).rows())
    delta = 0.05 * rows
    answer = sequence.solve(q, p, spec, delta=delta)
    assert abs(answer.gap) <= EXACT * rows
    assert answer.total_divergence == pytest.approx(delta, abs=EXACT * rows)
    pooled = ct.pooled_acceptance(q, p, divergence=spec, delta=0.05)
    assert pooled.mean_acceptance * rows == pytest.approx(answer.total_acceptance, abs=1e-9)
    assert pooled.price == pytest.approx(answer.price, rel=1e-8)


def test_the_answer_comes_with_the_program_beside_it(monkeypatch):
    answer = sequence.checked(Q, P, delta=0.1)
    assert answer.program == pytest.approx(answer.total_acceptance, abs=VALUE)
    assert "more than 5 entries" in str(sequence.checked(Q, P, delta=0.1, entries=5).program)
    monkeypatch.setattr(_program, "believable", lambda *args: False)
    without = sequence.checked(Q, P, delta=0.1)
    assert str(without.program).startswith("gave up: solver:")
    assert without.total_acceptance == answer.total_acceptance


@pytest.mark.parametrize("wrong, message", [(1.1, "misses its bound"), (0.9, "misses its bound")])
def test_a_wrong_price_or_bound_is_noticed(monkeypatch, wrong, message):
    right = _program.lagrange_bound
    monkeypatch.setattr(_program, "lagrange_bound", lambda *a: wrong * right(*a))
    with pytest.raises(RuntimeError, match=message):
        sequence.solve(Q, P, delta=0.05)


def test_total_variation_buys_the_same_wherever_it_is_spent():
    noise = np.random.default_rng(6)
    q, p = (noise.dirichlet(np.ones(6), size=4) for _ in range(2))
    program = sequence.solve(q, p, "total_variation", delta=0.3)
    lossless = np.minimum(q, p).sum()
    assert program.total_acceptance == pytest.approx(lossless + 0.3, abs=1e-9)
    assert program.price == pytest.approx(1) and program.solver == "HIGHS"


@pytest.mark.parametrize("spec", SUMMED)
def test_one_position_is_the_optimal_program(spec):
    q, p = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.5, 0.2, 0.1])
    one = optimal.solve(q, p, spec, delta=0.05)
    program = sequence.solve(q[None], p[None], spec, delta=0.05)
    assert program.total_acceptance == pytest.approx(one.acceptance, abs=VALUE)
    assert program.price == pytest.approx(one.price, rel=PRICE, abs=1e-6)


Q = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
P = np.array([[0.2, 0.7, 0.1], [0.2, 0.2, 0.6]])


def test_the_ends():
    strict = sequence.solve(Q, P, delta=0)
    np.testing.assert_allclose(strict.target, Q, rtol=1e-15)
    assert (strict.price, strict.gap, strict.solver) == (math.inf, 0.0, "identity")
    assert sequence.solve(Q, Q, delta=0).price == 0
    whole = sequence.solve(Q, P, delta=math.inf)
    assert whole.total_acceptance == pytest.approx(2, abs=VALUE) and whole.price == 0
    slack = sequence.program(Q, P, delta=9.0)
    assert sequence.solve(Q, P, delta=9.0).price == 0
    assert slack.total_acceptance == pytest.approx(2, abs=VALUE)
    assert slack.price == pytest.approx(0, abs=1e-6)


def test_a_position_that_gains_nothing_spends_nothing():
    program = sequence.solve(Q, P, delta=0.1)
    assert program.divergence[1] < 1e-8 and program.divergence[0] == pytest.approx(0.1, abs=1e-6)


def test_torch_rows_are_taken():
    program = sequence.solve(torch.tensor(Q), torch.tensor(P), delta=0.1)
    assert program.total_acceptance == pytest.approx(
        sequence.solve(Q, P, delta=0.1).total_acceptance
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_probs": Q[0], "draft_probs": P[0]}, r"must be rows \(T, V\)"),
        ({"target_probs": 2 * Q}, "must sum to 1"),
        ({"divergence": "renyi:a=0.5"}, "must be an f-divergence to be summed"),
        ({"divergence": "max_divergence"}, "must be an f-divergence to be summed"),
        ({"delta": -1}, "delta: must lie in"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"target_probs": Q, "draft_probs": P, "divergence": "kl", "delta": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        sequence.solve(**arguments)


@pytest.mark.parametrize("wrong, message", [(0.9, "exceeds"), (1.1, "misses its bound")])
def test_a_wrong_left_side_is_noticed(monkeypatch, wrong, message):
    right = _perspective._FORMS[KL]
    monkeypatch.setitem(_perspective._FORMS, KL, lambda terms, f: wrong * right(terms, f))
    with pytest.raises(RuntimeError, match=message):
        sequence.program(Q, P, delta=0.05)


def test_a_solver_without_an_answer_is_reported(monkeypatch):
    monkeypatch.setattr(_program, "believable", lambda *args: False)
    with pytest.raises(_program.SolverGaveUp, match="the rows must satisfy .*CLARABEL: no answer"):
        sequence.program(Q, P, delta=0.1)
