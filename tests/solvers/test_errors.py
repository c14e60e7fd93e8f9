"""What a design cannot do is said, by name: rules in conflict, wrong arguments, wrong answers."""

import math

import numpy as np
import pytest

from solvers import _attempts, _constraints, design
from solvers.design import Design, Infeasible

cp = pytest.importorskip("cvxpy")

Q, P = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
BASE = Design(Q, P)

CONFLICTS = {
    "two floors": (
        BASE.budget("kl", 0.5).floor({0: 0.6, 1: 0.2, 2: 0.5}).cap(9.0),
        {"floor 0", "floor 2"},
    ),
    "a cap below one": (BASE.protect(1).cap(0.9), {"cap"}),
    "a floor on a protected token": (
        BASE.budget("reverse_kl", 0.5).protect([2, 3]).floor({3: 0.2}),
        {"protect", "floor 3"},
    ),
    "an impossible mean": (
        BASE.budget("kl", 0.1).expect([1.0, 2.0, 3.0, 4.0], at_most=0.5),
        {"expectation"},
    ),
    "two of one's own": (
        BASE.require("few", lambda v: v.h[3] <= 0.1).require("many", lambda v: v.ratio[3] >= 2),
        {"few", "many"},
    ),
    "a budget of zero": (
        BASE.cap(2.0).budget("pearson_chi2", 0.0).floor({3: 0.2}),
        {"budget pearson_chi2", "floor 3"},
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_rules_in_conflict_are_named(name):
    conflicting, rules = CONFLICTS[name]
    with pytest.raises(Infeasible, match="no row meets all of: ") as caught:
        conflicting.solve()
    assert set(caught.value.constraints) == rules
    assert isinstance(caught.value, ValueError)
    assert all(rule in str(caught.value) for rule in rules)


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: Design(np.array([0.5, 0.6]), np.array([0.5, 0.5])), ValueError, "must sum to 1"),
        (lambda: BASE.budget("kl", -1), ValueError, "delta: must lie in"),
        (lambda: BASE.protect(4), ValueError, r"token: must lie in \[0, 3\]; got 4"),
        (lambda: BASE.protect([1, 1]), ValueError, "tokens: must be distinct"),
        (lambda: BASE.protect(1.0), TypeError, "token: must be an integer; got 1.0"),
        (lambda: BASE.cap(-1), ValueError, "ratio: must lie in"),
        (lambda: BASE.floor({1: 1.5}), ValueError, r"floor 1: must lie in \[0, 1\]"),
        (lambda: BASE.cap(2).cap(3), ValueError, "must have names of their own; got 'cap'"),
        (lambda: BASE.expect([1.0, 2.0], at_most=1), ValueError, "values must be 4 finite"),
        (lambda: BASE.expect(Q), ValueError, "exactly one of at_most and at_least"),
        (lambda: BASE.expect(Q, at_most=math.nan), ValueError, "expectation: must lie in"),
        (
            lambda: Design(np.array([1.0, 0.0]), np.array([0.5, 0.5])).floor({1: 0.1}),
            ValueError,
            "floor 1: must be 0 where the target is 0",
        ),
    ],
)
def test_wrong_arguments_are_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda v: True, TypeError, "mine: must return cvxpy"),
        (lambda v: cp.SOC(v.h[0], v.h[1:]), TypeError, "mine: must return cvxpy"),
        (lambda v: cp.norm(v.h) >= 0.2, ValueError, "mine: must be convex"),
        (lambda v: v.h[0] <= cp.Variable(), ValueError, "mine: must be about the named"),
        (lambda v: v.divergence("renyi:a=2") <= 1, ValueError, "must be an f-divergence here"),
    ],
)
def test_wrong_rules_of_ones_own_are_named(make, kind, message):
    with pytest.raises(kind, match=message):
        BASE.require("mine", make).solve()


@pytest.mark.parametrize("make", [
    lambda v, wide: cp.norm(cp.multiply(wide, v.h)) >= 0.2,
    lambda v, wide: [wide @ v.h <= 1, wide @ v.h <= cp.Variable()],
    lambda v, wide: wide,
])  # fmt: skip
def test_a_wrong_rule_is_named_without_its_arrays(make):
    """Rows of 600 tokens: cvxpy's own words would show them."""
    row = np.full(600, 1 / 600)
    wide = np.linspace(0.1234567, 1, 600)
    with pytest.raises((ValueError, TypeError), match="^mine: must ") as error:
        Design(row, row).budget("kl", 0.1).require("mine", lambda v: make(v, wide)).solve()
    assert len(str(error.value)) < 120 and "0.1234" not in str(error.value)


LIMITED = BASE.cap(1.8).protect(2).expect([0.0, 0.0, 1.0, 3.0], at_most=0.7)
FULL = LIMITED.budget("kl", 0.03)


@pytest.mark.parametrize(
    "place, name, delta",
    [
        (_constraints.BudgetConstraint, "budget kl", 0.01),
        (_constraints.LimitConstraint, "protect", 0.03),
        (_constraints.ExpectationConstraint, "expectation", 0.03),
    ],
)
def test_a_rule_that_the_program_gets_wrong_is_noticed(monkeypatch, place, name, delta):
    make = place.build

    def generous(self, quantities):
        constraints = make(self, quantities)
        if self.name == name:
            constraints[:] = [c.expr <= 0.2 for c in constraints]
        return constraints

    monkeypatch.setattr(place, "build", generous)
    with pytest.raises(_attempts.SolverGaveUp, match=f"{name} is exceeded|misses its bound"):
        LIMITED.budget("kl", delta).solve()


def test_one_refusal_is_not_a_conflict(monkeypatch):
    attempts, run = [], design.Program.attempt

    def refused_once(program, scale, solver):
        attempts.append(solver)
        answer = run(program, scale, solver)
        if len(attempts) == 1:
            answer.status, answer.h = "infeasible", None
        return answer

    monkeypatch.setattr(design.Program, "attempt", refused_once)
    assert abs(FULL.solve().gap) < 1e-6
    assert len(attempts) == 2
