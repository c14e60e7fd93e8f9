"""Designs: nothing extra is the optimum, every rule is kept, and what binds has its price."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cactus_theory as ct
from solvers.design import Design
from tests.amounts import some
from tests.solvers.cases import DIVERGENCES, Tally, budgets, examples, pairs

pytest.importorskip("cvxpy")

VALUE = 1e-6
KEPT = 1e-7
PRICE = 1e-3
Q, P = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])


def proven(row, q, p):
    h = row.target
    assert h.min() >= 0 and not h[q == 0].any()
    assert h.sum() == pytest.approx(1, abs=1e-9)
    assert row.acceptance == pytest.approx(np.minimum(p, h).sum(), abs=1e-12)
    assert min(row.slacks.values(), default=0) >= -KEPT
    assert row.gap == row.bound - row.acceptance and abs(row.gap) <= VALUE


@pytest.mark.parametrize("spec", some(DIVERGENCES, 6))
def test_a_budget_alone_is_the_optimum(spec):
    tally = Tally()
    name = f"budget {ct.divergence(spec).spec}"

    @examples(spec, most=20, thorough=40)
    @given(pairs(), budgets())
    def agree(rows, delta):
        q, p = rows
        row = tally.solve(Design(q, p).budget(spec, delta).solve)
        if row is None:
            return
        proven(row, q, p)
        closed = ct.optimal_acceptance(q, p, divergence=spec, delta=delta)
        assert abs(row.acceptance - closed.acceptance) <= VALUE
        clear = spec not in ("total_variation", "max_divergence") and closed.price > 1e-3
        if clear and closed.divergence > delta - 1e-9:
            assert abs(row.duals[name] / closed.price - 1) <= PRICE

    agree()
    tally.check()


def test_no_rule_at_all_is_the_draft():
    bare = Design(Q, P)
    bare.cap(1.5)  # another design: this one stays what it was
    row = bare.solve()
    np.testing.assert_allclose(row.target, P, atol=1e-6)
    assert row.acceptance == pytest.approx(1, abs=VALUE) and row.duals == {}


@examples("kl", most=12, thorough=60)
@given(pairs(), budgets(), st.floats(1.05, 4), st.integers(0, 31), st.floats(0.1, 0.9))
def test_random_rules_are_kept_and_proved(rows, delta, ratio, token, share):
    q, p = rows
    token %= len(q)
    cost = np.linspace(-1, 1, len(q))
    design = (
        Design(q, p)
        .budget("kl", delta)
        .budget("squared_hellinger", delta / 2)
        .cap(ratio)
        .protect(token)
        .floor({token: share * q[token]})
        .expect(cost, at_most=max(cost @ q, 0.0))
    )
    row = design.solve()
    proven(row, q, p)
    h = row.target
    assert h[token] <= q[token] and (h <= ratio * q).all()
    assert h[token] >= share * q[token]
    best = ct.optimal_acceptance(q, p, delta=delta).acceptance
    assert np.minimum(p, q).sum() - VALUE <= row.acceptance <= best + VALUE


STEP = 1e-4
COST = np.array([0.0, 0.0, 1.0, 3.0])
BASE = Design(Q, P).budget("kl", 0.2)


@pytest.mark.parametrize(
    "make, limit, room, rule, token",
    [
        (lambda limit: Design(Q, P).budget("kl", limit), 0.2, 1, "budget kl", None),
        (lambda limit: BASE.cap(limit), 1.5, 0.1, "cap", 3),
        (lambda limit: BASE.expect(COST, at_most=limit), 0.6, 1, "expectation", None),
        (lambda limit: BASE.expect(-COST, at_least=limit), -0.6, -1, "expectation", None),
        (lambda limit: BASE.floor({0: limit}), 0.38, -1, "floor 0", 0),
    ],
    ids=["budget", "cap", "at most", "at least", "floor"],
)
def test_a_binding_rule_is_priced_at_what_room_buys(make, limit, room, rule, token):
    """``room`` is what a unit of the limit gives: q_3 for a cap, less than none for a floor."""
    row, more = make(limit).solve(), make(limit + STEP).solve()
    assert row.slacks[rule] == pytest.approx(0, abs=1e-6)
    dual = row.duals[rule] if token is None else row.duals[rule][token]
    assert dual > 0.05
    rise = (more.acceptance - row.acceptance) / STEP
    assert room * dual == pytest.approx(rise, rel=0.02)


def test_a_protected_token_is_held_and_priced():
    row = BASE.protect([2, 3]).solve()
    proven(row, Q, P)
    assert (row.target[2:] <= Q[2:]).all()
    assert row.duals["protect"][3] > 0.1 and set(row.duals["protect"]) == {2, 3}
    assert BASE.solve().target[3] > Q[3] + 0.05
    # everything that the draft offers beyond the target is protected: nothing is gained
    assert row.acceptance == pytest.approx(np.minimum(Q, P).sum(), abs=VALUE)


@pytest.mark.parametrize("seed", some([1, 8], 1))
def test_noise_of_a_dual_is_no_binding_token(seed):
    """The band stays below 1.3 q, so that h ≤ 3 q binds nowhere, on tokens down to 1e-11."""
    noise = np.random.default_rng(seed)
    q = np.exp(5 * noise.standard_normal(80))
    p = q * np.exp(noise.standard_normal(80))
    q, p = q / q.sum(), p / p.sum()
    best = ct.optimal_acceptance(q, p, delta=0.02)
    assert best.upper < 1.3 and q.min() < 1e-10
    row = Design(q, p).budget("kl", 0.02).cap(3.0).solve()
    assert set(row.duals["cap"].values()) == {0.0}
    assert row.duals["budget kl"] == pytest.approx(best.price, rel=PRICE)


def test_what_binds_is_priced_token_by_token():
    """With h ≤ 1.5 q and a loose budget the tokens with p > 1.5 q pay, one for one."""
    noise = np.random.default_rng(3)
    q, p = (noise.dirichlet(np.ones(60)) + 1e-3 for _ in range(2))
    q, p = q / q.sum(), p / p.sum()
    row = Design(q, p).cap(1.5).budget("kl", 3.0).protect(int(q.argmax())).solve()
    paying = {token for token, price in row.duals["cap"].items() if price}
    assert paying == set(np.flatnonzero(p > 1.5 * q))
    assert all(row.duals["cap"][token] == pytest.approx(1, abs=1e-3) for token in paying)
    assert row.duals["budget kl"] == 0 and row.duals["protect"] == {int(q.argmax()): 0}


def test_where_nothing_binds_all_prices_are_nought():
    row = BASE.cap(40.0).protect(0).floor({3: 0.01}).expect(COST, at_most=9.0).solve()
    assert row.acceptance == pytest.approx(BASE.solve().acceptance, abs=VALUE)
    duals = {name: dual for name, dual in row.duals.items() if name != "budget kl"}
    for name, dual in duals.items():
        assert set(dual.values() if isinstance(dual, dict) else [dual]) == {0.0}, name
    assert row.duals["budget kl"] > 0.1


def test_the_cap_is_the_max_divergence_band():
    row = Design(Q, P).cap(math.exp(0.3)).solve()
    closed = ct.optimal_acceptance(Q, P, divergence="max_divergence", delta=0.3)
    assert row.acceptance == pytest.approx(closed.acceptance, abs=1e-9)
    assert row.solver == "HIGHS"


def test_a_budget_of_zero_is_the_target():
    row = BASE.budget("reverse_kl", 0.0).protect(3).solve()
    np.testing.assert_allclose(row.target, Q, rtol=1e-15)
    assert (row.solver, row.gap, row.acceptance) == ("identity", 0.0, row.lossless)
