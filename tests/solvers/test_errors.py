"""Wrong arguments of every program, rules in conflict and wrong answers are said, by name."""

import math

import numpy as np
import pytest

from solvers import (
    _attempts,
    _constraints,
    block,
    decode,
    design,
    optimal,
    per_proposal,
    sequence,
)
from solvers.design import Design, Infeasible
from solvers.path_tree import PathTree
from tests.solvers.cases import random_tree

pytest.importorskip("cvxpy")

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


ROW, ROWS, TREE = np.array([0.5, 0.5]), np.full((3, 2), 0.5), random_tree(2, 1, seed=1)
WIDE = np.full((3, 3), 1 / 3)


def decoded(**change):
    rows = np.full((2, 2), 0.5)
    given = {"target_probs": rows, "draft_probs": rows, "num_draft_tokens": 1, "per_token": 0.1}
    return decode.solve(**given | change)


# fmt: off
WRONG = [
    (lambda: Design(np.array([0.5, 0.6]), ROW), ValueError, "must sum to 1"),
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
    (lambda: Design(np.array([1.0, 0.0]), ROW).floor({1: 0.1}), ValueError,
     "floor 1: must be 0 where the target is 0"),
    (lambda: block.solve(TREE, price=1, per_token=1), ValueError,
     "exactly one; got price, per_token"),
    (lambda: block.solve(TREE), ValueError, "exactly one; got none"),
    (lambda: block.solve(TREE, price=-1), ValueError, "price: must lie in"),
    (lambda: block.solve(TREE, per_token=math.nan), ValueError, "per_token: must lie in"),
    (lambda: block.solve(TREE, "renyi:a=2", price=1), ValueError,
     "must be an f-divergence to be sum"),
    (lambda: block.solve(TREE, "max_divergence", price=1), ValueError,
     "an f-divergence to be summed"),
    (lambda: block.solve(np.ones((1, 1)), price=1), TypeError, "tree: must be a PathTree"),
    (lambda: optimal.solve(ROW, WIDE[0], delta=0.1), ValueError, "draft_probs: vocabulary"),
    (lambda: optimal.solve(ROWS[:2], ROW, delta=0.1), ValueError,
     r"target_probs: must be one row .*\(2, 2\)"),
    (lambda: optimal.solve(ROW, ROW, delta=-0.1), ValueError,
     r"delta: must lie in \[0, inf\]; got -0.1"),
    (lambda: optimal.solve(ROW, ROW, delta="much"), ValueError, "delta: must be a number"),
    (lambda: optimal.solve(ROW, ROW, delta=0.1, support="draft"), ValueError,
     "support: must be one of target, free"),
    (lambda: per_proposal.solve(np.array([0.5, 0.6]), 1, delta=0.1), ValueError,
     "target_probs: every row"),
    (lambda: per_proposal.solve(np.array([1, 0]), 1, delta=0.1), TypeError,
     "target_probs: must hold floats"),
    (lambda: per_proposal.solve(ROW, 2, delta=0.1), ValueError,
     r"token: must lie in \[0, 1\]; got 2"),
    (lambda: per_proposal.solve(ROW, -1, delta=0.1), ValueError,
     r"token: must lie in \[0, 1\]; got -1"),
    (lambda: per_proposal.solve(ROW, True, delta=0.1), TypeError,
     "token: must be an integer; got True"),
    (lambda: per_proposal.solve(ROW, 1, delta=-1), ValueError, "delta: must lie in"),
    (lambda: sequence.solve(ROW, ROW, "kl", delta=0.1), ValueError, r"must be rows \(T, V\)"),
    (lambda: sequence.solve(ROWS, ROWS, "renyi:a=0.5", delta=0.1), ValueError,
     "must be an f-divergence to be summed"),
    (lambda: sequence.solve(ROWS, ROWS, "kl", delta=-1), ValueError, "delta: must lie in"),
    (lambda: PathTree(ROW, ROW), ValueError, r"must be \(nodes, V\), a row a prefix"),
    (lambda: PathTree(ROWS[:2], ROWS[:2]), ValueError, "2 tokens has 1 rows or 3; got 2"),
    (lambda: PathTree(2 * ROWS, ROWS), ValueError, "must sum to 1"),
    (lambda: PathTree(ROWS, WIDE), ValueError, "vocabulary must equal"),
    (lambda: PathTree(np.ones((6000, 1)), np.ones((6000, 1))), ValueError,
     "at most 5000 rows; got 6000"),
    (lambda: decoded(per_token=-1.0), ValueError, "per_token: "),
    (lambda: decoded(num_draft_tokens=0), ValueError, "num_draft_tokens: must be a whole number"),
    (lambda: decoded(divergence="renyi:a=2"), ValueError, "divergence: "),
    (lambda: decoded(target_probs=ROWS, draft_probs=ROWS), ValueError, r"must be \(V, V\), a row"),
]
# fmt: on


@pytest.mark.parametrize(("make", "kind", "message"), WRONG, ids=[own[2] for own in WRONG])
def test_wrong_arguments_are_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


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

    def generous(self, row, inside):
        constraints = make(self, row, inside)
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
