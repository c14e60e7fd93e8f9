import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cactus_theory as ct
from cactus_theory.divergences import list_divergences
from solvers import optimal, per_proposal
from tests.amounts import amount, some
from tests.solvers.cases import (
    DIVERGENCES,
    LINEAR,
    Tally,
    budgets,
    examples,
    families,
    pairs,
    share_of_draft,
)

ACCEPTANCE = 1e-6
# duals of interior-point methods are good to about 1e-5 relative where the price is not tiny
PRICE = 1e-3
SMALLEST_PRICE = 1e-3
# the optimum is flat: a row may be off by the square root of what its acceptance is off by; the
# largest seen is 0.0044, of Neyman where a draft proposes what the target all but excludes
ROW = 1e-2
# between a program's acceptance and its bound
GAP = 1e-6


def compare(tally, spec, q, p, delta, support):
    program = tally.solve(optimal.solve, q, p, spec, delta=delta, support=support)
    if program is None:
        return
    closed = ct.optimal_acceptance(q, p, divergence=spec, delta=delta, support=support)
    assert abs(program.acceptance - closed.acceptance) <= ACCEPTANCE
    assert closed.acceptance <= program.bound + 1e-9
    feasible(program, q, p, delta, support)
    unique = spec not in LINEAR and closed.price > SMALLEST_PRICE
    if unique and closed.divergence > delta - 1e-9:
        assert abs(program.price / closed.price - 1) <= PRICE
        errors = np.abs(program.target - closed.target)[stiff(spec, q, closed)]
        assert errors.max(initial=0.0) <= ROW


def stiff(spec, q, closed):
    """Return where moving ROW of mass costs more than a certified answer may miss the optimum by.

    Elsewhere the row is not unique to that: a token whose h is thousands of times its q may cost
    within 1e-7 of what one that the target excludes costs.
    """
    inside = q > 0
    ratio = torch.from_numpy(np.where(inside, closed.target / np.where(inside, q, 1.0), 1.0))
    curvature = ct.divergence(spec).generator.curvature(ratio.clamp(min=1e-300)).numpy()
    return inside & (closed.price * curvature * ROW**2 / 2 > GAP * q)


def feasible(program, q, p, delta, support):
    h = program.target
    assert h.min() >= 0
    assert h.sum() == pytest.approx(1, abs=1e-12)
    assert support == "free" or not h[q == 0].any()
    assert program.divergence <= delta + 1e-7
    assert np.minimum(p, h).sum() == pytest.approx(program.acceptance, abs=1e-12)
    assert abs(program.gap) <= GAP
    assert program.gap == program.bound - program.acceptance


@pytest.mark.parametrize("spec", DIVERGENCES)
def test_the_closed_form_is_the_optimum_of_the_program(spec):
    tally = Tally()

    @examples(spec)
    @given(pairs(), budgets(), st.sampled_from(optimal.SUPPORTS))
    def agree(rows, delta, support):
        compare(tally, spec, *rows, delta, support)

    agree()
    tally.check()


@pytest.mark.parametrize("spec", some(DIVERGENCES, 3))
def test_rows_of_every_family_too(spec):
    """Scarce, usual, generous and slack budgets, and the most that a token can be raised."""
    noise, tally = np.random.default_rng(20), Tally()
    for size, share in ((3, 0.02), (24, 0.3), (64, 0.7), (8, 0.1), (8, 1.3))[: amount(2, 5)]:
        for family, (q, p) in families(size, noise).items():
            delta = share_of_draft(spec, q, p, share)
            for support in optimal.SUPPORTS if "zeros" in family else ("target",):
                compare(tally, spec, q, p, delta, support)
            token = int(np.argmax(np.where(q > 0, p, -1.0)))
            raised = ct.policy("cactus_exact", delta=delta, divergence=spec).gamma(torch.tensor(q))
            program = per_proposal.solve(q, token, divergence=spec, delta=delta)
            assert program.raised == pytest.approx(float(raised[token]), abs=ACCEPTANCE)
    assert not tally.gave_up


@pytest.mark.parametrize("spec", ["kl", "pearson_chi2", "max_divergence", "renyi:a=2"])
def test_free_support_changes_nothing_where_leaking_costs_everything(spec):
    q, p = np.array([0.5, 0.5, 0.0]), np.array([0.6, 0.1, 0.3])
    results = [optimal.solve(q, p, spec, delta=0.1, support=s) for s in optimal.SUPPORTS]
    np.testing.assert_array_equal(results[0].target, results[1].target)


@pytest.mark.parametrize("spec", ["kl", "reverse_kl", "jensen_shannon", "total_variation"])
def test_a_vocabulary_of_a_thousand_is_solved(spec):
    generator = np.random.default_rng(1)
    q, p = (np.maximum(generator.dirichlet(np.full(1000, 0.5)), 1e-9) for _ in range(2))
    q, p = q / q.sum(), p / p.sum()
    program = optimal.solve(q, p, spec, delta=0.1)
    closed = ct.optimal_acceptance(q, p, divergence=spec, delta=0.1)
    assert program.acceptance == pytest.approx(closed.acceptance, abs=ACCEPTANCE)


@pytest.mark.parametrize("support", optimal.SUPPORTS)
@pytest.mark.parametrize("spec", DIVERGENCES)
def test_budget_zero_is_the_target_itself(spec, support):
    q, p = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.6, 0.1, 0.1])
    program = optimal.solve(q, p, spec, delta=0, support=support)
    np.testing.assert_array_equal(program.target, q)
    assert program.solver == "identity"
    assert program.divergence == program.gap == 0
    assert program.price == {"total_variation": 1.0, "max_divergence": 0.3}.get(spec, np.inf)


@pytest.mark.parametrize("spec", [*LINEAR, "reverse_kl", "jensen_shannon", "renyi:a=0.5"])
def test_the_price_at_budget_zero_is_the_slope_of_the_frontier(spec):
    q, p = np.array([0.6, 0.4, 0.0]), np.array([0.5, 0.3, 0.2])  # gains only by leaking
    strict = optimal.solve(q, p, spec, delta=0, support="free")
    step = 1e-5
    slope = (
        ct.optimal_acceptance(q, p, divergence=spec, delta=step, support="free").acceptance
        - strict.acceptance
    ) / step
    assert strict.price == pytest.approx(slope, rel=0.02, abs=1e-9)
    assert optimal.solve(q, p, spec, delta=0).price == 0


@pytest.mark.parametrize("delta", [50.0, np.inf])
@pytest.mark.parametrize("spec", DIVERGENCES)
def test_a_budget_that_does_not_bind_has_price_zero(spec, delta):
    q, p = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.6, 0.1, 0.1])
    program = optimal.solve(q, p, spec, delta=delta)
    assert program.acceptance == pytest.approx(0.9, abs=1e-6)
    assert program.price == pytest.approx(0, abs=1e-6)


def test_every_divergence_is_compared():
    assert {spec.partition(":")[0] for spec in DIVERGENCES} == set(list_divergences())


def test_a_missing_cvxpy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    q, p = np.array([0.5, 0.5]), np.array([0.2, 0.8])
    with pytest.raises(ModuleNotFoundError, match=r"cvxpy is not installed.*\[solvers\]"):
        optimal.solve(q, p, delta=0.1)
    assert optimal.solve(q, p, delta=0).solver == "identity"


@pytest.mark.parametrize(("x", "y"), [(0.2, 0.9), (0.6, 0.55), (0.97, 0.01)])
@pytest.mark.parametrize("share", [0.1, 0.7])
def test_two_tokens_leave_one_direction(x, y, share):
    """Within KL(h‖q) of a row h on the way from q to p nothing closer to p can be emitted."""
    z = x + share * (y - x)
    q, p, h = (np.array([value, 1 - value]) for value in (x, y, z))
    delta = float(h @ np.log(h / q))
    for best in (optimal.solve(q, p, delta=delta), ct.optimal_acceptance(q, p, delta=delta)):
        assert best.acceptance == pytest.approx(1 - abs(y - z), abs=ACCEPTANCE)
        assert best.target == pytest.approx(h, abs=ACCEPTANCE)
